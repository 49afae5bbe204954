"""Prompts and decodes in turn, where a step of both would be mostly overhead.

Beside decodes a chunk has what their TPOT leaves of a step, and that is nothing where what such a step costs
besides is as much. In turn a chunk has a whole step, and decodes make up for the pause by as many steps as it
takes: TPOT is a mean.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from loong.core.request import RequestView
from loong.scheduler.tuning import HOPELESS_PREFILL_SHARE, MIN_PREFILL_SHARE, TPOT_MARGIN


@dataclass(frozen=True, slots=True)
class PrefillDecodeInterleaving:
    """Decodes that take `decode_seconds` a step by themselves, and the `target` TPOT of the tightest."""

    decode_seconds: float
    target: float

    @property
    def pace(self) -> float:
        """Seconds between two tokens on average, the pauses included."""
        share = HOPELESS_PREFILL_SHARE if self.is_hopeless else MIN_PREFILL_SHARE
        return max(TPOT_MARGIN * self.target, self.decode_seconds / (1 - share))

    @property
    def is_hopeless(self) -> bool:
        """Whether decodes alone take all the time there is: to hold prompts up would not bring them in time.

        Prompts then have as much time as they have. Else a machine would do the less the slower it is.
        """
        return self.decode_seconds > TPOT_MARGIN * self.target

    @property
    def prompt_share(self) -> float:
        """Of the time, that prompts have."""
        return 1 - self.decode_seconds / self.pace

    @property
    def saved(self) -> float:
        """Seconds that each decode step makes up for."""
        return self.pace - self.decode_seconds

    def num_due(self, decodes: Iterable[RequestView], now: float, seconds: float, most_steps: int) -> int:
        """Decode steps, at most so many, that are due before a chunk may take `seconds`.

        What is so far behind that these would not bring it back owes nothing but its last pause, or prompts
        would never go on.
        """
        most = self.saved * most_steps
        return ceil(max((self._debt(view, now, seconds, most) for view in decodes), default=0.0) / self.saved)

    def _debt(self, view: RequestView, now: float, seconds: float, most: float) -> float:
        if view.first_token_time is None or view.last_token_time is None:
            return 0.0
        debt = seconds + now - view.first_token_time - self.pace * view.num_output_tokens
        if debt <= most:
            return max(0.0, debt)
        paused = now - view.last_token_time
        return min(paused, most) if paused >= self.decode_seconds else 0.0
