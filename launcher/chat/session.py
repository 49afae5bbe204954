"""A conversation: its messages, and the commands that the user may type."""

import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import TextIO

from loong.launcher.chat.client import ChatError, ChatServer, Message
from loong.launcher.chat.speed import AnswerSpeed

HELP = """\
/reset          forget what was said
/system TEXT    forget it, and start with this system message
/exit, Ctrl-D   end; Ctrl-C stops an answer"""


@dataclass
class Session:
    """One conversation, printed to `out`, and the speed of its answers to `notes`.

    `take` returns whether it goes on.
    """

    server: ChatServer
    options: Mapping[str, object]
    system: str | None = None
    out: TextIO = field(default_factory=lambda: sys.stdout)
    notes: TextIO = field(default_factory=lambda: sys.stderr)
    messages: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset(self.system)

    def reset(self, system: str | None) -> None:
        """Drop all messages, and start with this system message if one is given."""
        self.system = system
        self.messages[:] = [] if system is None else [{"role": "system", "content": system}]

    def take(self, line: str) -> bool:
        """Carry out a command, or send the line; return False if it ends the conversation."""
        command, _, rest = line.partition(" ")
        match command:
            case "":
                pass
            case "/exit" | "/quit":
                return False
            case "/reset":
                self.reset(self.system)
                self._say("(forgotten)")
            case "/system":
                self.reset(rest.strip() or None)
                self._say("(forgotten; this is the system message now)" if self.system else "(forgotten)")
            case _ if command.startswith("/"):
                self._say(HELP if command == "/help" else f"there is no {command}\n{HELP}")
            case _:
                self._ask(line)
        return True

    def _ask(self, line: str) -> None:
        """Print the answer as it comes. An answer that fails is dropped; one that is interrupted is kept."""
        asked: Message = {"role": "user", "content": line}
        pieces: list[str] = []
        speed = AnswerSpeed()
        try:
            with closing(self.server.answer([*self.messages, asked], self.options)) as answer:
                for piece in answer:
                    speed.take(piece)
                    pieces.append(piece.text)
                    self.out.write(piece.text)
                    self.out.flush()
            self._say("")
        except KeyboardInterrupt:
            self._say("\n(stopped)")
        except ChatError as error:
            self._say(f"error: {error}")
            return
        self._note(str(speed))
        self.messages += [asked, {"role": "assistant", "content": "".join(pieces)}]

    def _note(self, text: str) -> None:
        """Print a note that is no part of the answer, in pale letters on a terminal."""
        if text:
            print(
                f"\x1b[2m({text})\x1b[0m" if self.notes.isatty() else f"({text})", file=self.notes, flush=True
            )

    def _say(self, text: str) -> None:
        print(text, file=self.out, flush=True)
