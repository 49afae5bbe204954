"""A conversation as the input of a chat template."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from loong.core.errors import InvalidRequestError
from loong.server.text.chat_template import ChatTemplate
from loong.server.text.turn_content import followed_by, in_other_form, last_text, like, text_of
from loong.server.tools.plain_turns import Turn, plain_turns

SYSTEM_ROLES = ("system", "developer")
_END = "\ufdd0end\ufdd1 "  # after the text to continue; clients' texts have no such characters


class SystemTurns(Enum):
    """The form in which turns of the roles `system` and `developer` go to a template."""

    AS_SENT = auto()
    JOINED = auto()  # all that come first are one turn, and the others have the role `system` too
    BEFORE_USER = auto()  # all that come first are the beginning of the next turn


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The form in which turns go to a template: as they were sent, or so that it leaves out none.

    Contents `in_other_form` are parts instead of a text, or the reverse.
    """

    system_turns: SystemTurns = SystemTurns.AS_SENT
    in_other_form: int = 0  # a bit for each turn: many arrangements are kept

    def of(self, turns: Sequence[Turn]) -> list[Turn]:
        """Return the turns in this arrangement."""
        arranged = [
            {**turn, "content": in_other_form(turn["content"])} if self.in_other_form >> index & 1 else turn
            for index, turn in enumerate(turns)
        ]
        if self.system_turns is SystemTurns.AS_SENT:
            return arranged
        arranged = [{**turn, "role": "system"} if turn["role"] in SYSTEM_ROLES else turn for turn in arranged]
        num_first = next((i for i, turn in enumerate(arranged) if turn["role"] != "system"), len(arranged))
        if self.system_turns is SystemTurns.BEFORE_USER and {"user"} == {
            turn["role"] for turn in arranged[num_first : num_first + 1]
        }:
            num_first += 1
        return [*_as_one(arranged[:num_first]), *arranged[num_first:]]


def _as_one(turns: Sequence[Turn]) -> Sequence[Turn]:
    """Return turns as one turn, like the last of them."""
    if len(turns) < 2:
        return turns
    text = "\n\n".join(text_of(turn["content"]) for turn in turns)
    return [{**turns[-1], "content": like(turns[-1]["content"], text)}]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns as a client sent them, and what else a template sees.

    Tools that the template does not know are described in the first turn, which may be an additional one.
    """

    template: ChatTemplate
    turns: Sequence[Turn]
    fields: Sequence[str]  # the field of each turn, as errors name it
    tools: Sequence[object] | None
    variables: Mapping[str, object]
    add_generation_prompt: bool
    is_continued: bool = False  # the prompt ends with the text of the last turn

    def request(self, arrangement: Arrangement) -> bytes:
        """Return what a renderer needs to write the prompt."""
        turns = arrangement.of(self.turns)
        if not self.template.knows_tools:
            turns = plain_turns(turns)
        if self.is_continued:
            turns[-1] = {**turns[-1], "content": followed_by(turns[-1]["content"], _END)}
        return self.template.request(
            turns,
            tools=self.tools,
            variables=self.variables,
            add_generation_prompt=self.add_generation_prompt,
        )

    def prompt(self, rendered: str) -> str:
        """Return the prompt, which is what the template has written, or its beginning.

        Raises `InvalidRequestError` if the text to continue is not there.
        """
        if not self.is_continued:
            return rendered
        prompt, end, after = rendered.rpartition(_END.rstrip())
        if not end or last_text(self.turns[-1]["content"]).strip() not in prompt:
            message = "continue_final_message: the model's chat template changes or leaves out this message"
            raise InvalidRequestError(message, param="continue_final_message")
        keeps_blanks = f"{end}{after}".startswith(_END)
        return prompt if keeps_blanks else prompt.rstrip()
