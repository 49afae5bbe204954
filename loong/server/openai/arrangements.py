"""The choice of an arrangement in which a chat template leaves out no turn."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loong.server.api.errors import bad_request
from loong.server.openai.conversation import Arrangement, SystemTurns
from loong.server.openai.probe import Piece, Probe
from loong.server.text.chat_renderer import ChatRenderer, refusal
from loong.server.text.template_process import Outcome

logger = logging.getLogger(__name__)

MAX_KNOWN = 1024
_MAX_FORMS = 3  # of contents that are tried for one form of system turns


class Arrangements:
    """The arrangements of the last conversations, by their structure."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._known: OrderedDict[bytes, Arrangement] = OrderedDict()
        self._has_warned = False

    async def of(self, probe: Probe) -> Arrangement:
        """Return how to give the conversation of a probe to its template.

        Raises a 400 that names what the template leaves out in any case. Of turns with calls, templates may
        leave out the content.
        """
        if (known := self._known.get(probe.structure)) is not None:
            self._known.move_to_end(probe.structure)
            return known
        found = await self._found(probe)
        if found is None:
            return Arrangement()  # the template says why it refuses it
        for piece in found.left_out:
            if piece.is_needed:
                message = f"{piece.field}: the model's chat template leaves {piece.words} out"
                raise bad_request(message, piece.field.split(".")[0])
        self._warn(found.left_out)
        self._known[probe.structure] = found.arrangement
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return found.arrangement

    async def _found(self, probe: Probe) -> "_Found | None":
        """Return the arrangement that leaves out least, or None if the template refuses all."""
        best, tried = None, None
        for system_turns in SystemTurns:
            turns = Arrangement(system_turns).of(probe.conversation.turns)
            if turns == tried or (system_turns is SystemTurns.BEFORE_USER and best is None):
                continue  # a template that refuses system turns means it
            tried = turns
            best = _better(best, await self._found_form(probe, system_turns))
            if best is not None and not best.num_needed:
                break
        return best

    async def _found_form(self, probe: Probe, system_turns: SystemTurns) -> "_Found | None":
        """Return the forms of contents that leave out least, or None if the template refuses all."""
        contents = [turn["content"] for turn in probe.conversation.turns]
        lists = _bits(index for index, content in enumerate(contents) if isinstance(content, list))
        best, others, tried = None, 0, set[int]()
        while others not in tried and len(tried) < _MAX_FORMS:
            tried.add(others)
            arrangement = Arrangement(system_turns, others)
            left_out = await self._left_out(probe, arrangement)
            if left_out is None:
                others ^= lists ^ others or _bits(range(len(contents)))
            else:
                best = _better(best, _Found(arrangement, left_out))
                others ^= _bits({piece.turn for piece in left_out if piece.turn is not None})
        return best

    async def _left_out(self, probe: Probe, arrangement: Arrangement) -> list[Piece] | None:
        """Return what the template leaves out, or None if it refuses the arrangement."""
        request = await asyncio.to_thread(probe.conversation.request, arrangement)
        outcome, text = await self._renderer.answer(request)
        match outcome:
            case Outcome.TEXT:
                return await asyncio.to_thread(probe.left_out_of, text)
            case Outcome.REFUSED:
                return None
            case Outcome.EXCEEDED:
                raise refusal(text)

    def _warn(self, left_out: Sequence[Piece]) -> None:
        if left_out and not self._has_warned:
            self._has_warned = True
            logger.warning("the model's chat template leaves out what assistants write before tool calls")


@dataclass(frozen=True, slots=True)
class _Found:
    """An arrangement, and what the template leaves out in it."""

    arrangement: Arrangement
    left_out: Sequence[Piece]

    @property
    def num_needed(self) -> int:
        """Return the number of pieces that must not be left out."""
        return sum(piece.is_needed for piece in self.left_out)


def _bits(numbers: Iterable[int]) -> int:
    """Return an integer with the bits of these numbers."""
    return sum(1 << number for number in numbers)


def _better(one: _Found | None, other: _Found | None) -> _Found | None:
    """Return the one that leaves out less, the first if they are equal."""
    found = [each for each in (one, other) if each is not None]
    return min(found, key=lambda each: (each.num_needed, len(each.left_out)), default=None)
