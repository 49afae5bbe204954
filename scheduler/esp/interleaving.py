"""Prompts and decodes in turn, where a mixed step would be mostly overhead.

In a mixed step, a chunk has the time that the decodes' TPOT leaves, which may be less than the step's
overhead. In turn, a chunk has a whole step, and decodes make up for the pause with faster steps afterwards,
since TPOT is a mean.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from loong.core.request import RequestView
from loong.scheduler.tuning import HOPELESS_PREFILL_SHARE, MIN_PREFILL_SHARE, PLANNED_TPOT_SHARE


@dataclass(frozen=True, slots=True)
class PrefillDecodeInterleaving:
    """Decodes that take `decode_seconds` a step by themselves, and the `target` TPOT of the tightest."""

    decode_seconds: float
    target: float

    @property
    def pace(self) -> float:
        """Return the mean seconds between two tokens, with pauses."""
        share = HOPELESS_PREFILL_SHARE if self.is_hopeless else MIN_PREFILL_SHARE
        return max(PLANNED_TPOT_SHARE * self.target, self.decode_seconds / (1 - share))

    @property
    def is_hopeless(self) -> bool:
        """Return whether decodes alone take all the time: delaying prompts would not bring them in time.

        Prompts then get their full time. Otherwise a slower machine would compute fewer prompts.
        """
        return self.decode_seconds > PLANNED_TPOT_SHARE * self.target

    @property
    def prompt_share(self) -> float:
        """Return the share of the time that prompts have."""
        return 1 - self.decode_seconds / self.pace

    @property
    def saved(self) -> float:
        """Return the seconds of pause that each decode step makes up for."""
        return self.pace - self.decode_seconds

    def num_due(self, decodes: Iterable[RequestView], now: float, seconds: float, most_steps: int) -> int:
        """Return the decode steps, at most `most_steps`, that are due before a chunk may take `seconds`.

        A request too far behind to catch up within these steps only makes up for its last pause. Otherwise
        prompts would never go on.
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
