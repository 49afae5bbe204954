"""The published policy's equations: LoongServe (SOSP'24), by their numbers there.

The waiting time of a request counts in seconds for each of its tokens, so short requests count most. The
caller predicts the seconds.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from loong.core.request import RequestView
from loong.scheduler.common.borrowed_kv import borrowed_by_last
from loong.scheduler.common.request_lengths import Lengths


def paper_weight(num_input_tokens: int) -> float:
    """Return the weight of a second of a prefill for one of its prompts, in (2), (3), (4) and (5)."""
    return 1 / num_input_tokens


def dispatch_cost(prefill_time: float, num_output_tokens: Iterable[int]) -> float:
    """Return (1): the cost of a prefill on a decode batch's instances for that batch, which waits.

    `prefill_time` is T(R_p + R'_i, E_p + G_i), in seconds: all prompts chosen, on all idle instances and the
    batch's; `num_output_tokens` is that of each request in the batch.
    """
    return sum(prefill_time / num_tokens for num_tokens in num_output_tokens)


def dispatch_gain(
    avg_decode_time: float, decode_times: Iterable[float], num_input_tokens: Iterable[int]
) -> float:
    """Return (2): the gain of prompts R'_i that need not wait for a decode batch. Stop it if above (1).

    In seconds, `avg_decode_time` is the decode time of a request, and `decode_times` the times for which
    those in the batch, at least one, have decoded. `num_input_tokens` is that of each prompt.
    """
    wait = max(0.0, avg_decode_time - min(decode_times))
    return sum(wait * paper_weight(num_tokens) for num_tokens in num_input_tokens)


def allocation_gain(prefill_time: float, wider_prefill_time: float, num_input_tokens: Iterable[int]) -> float:
    """Return (3): the gain of prompts R_p if e_min, the decode instance with least KV, joins them.

    The times are T(R_p, E_p) and T(R_p, E_p + e_min), in seconds.
    """
    saved = prefill_time - wider_prefill_time
    return sum(saved * paper_weight(num_tokens) for num_tokens in num_input_tokens)


def allocation_cost(migration_time: float, num_input_tokens: Iterable[int]) -> float:
    """Return (4): the cost of prompts R_p that wait until e_min is free. Join it unless above (3).

    `migration_time` is the seconds to move its KV away, V(e_min) over the bandwidth.
    """
    return sum(migration_time * paper_weight(num_tokens) for num_tokens in num_input_tokens)


@dataclass(frozen=True, eq=False)
class FutureKV:
    """The slots that requests will use if each goes on to its declared end and then frees its own.

    A request with c tokens in slots and l to come has c + t after t steps and is gone after step l. With the
    longest-lived first, the most ever in use is the maximum over k of l_k k + sum of c_i for i <= k. That is
    when the k-th ends and none before it has. Admission keeps this within capacity, so no request is ever
    evicted.
    """

    remaining: NDArray[np.int64]  # [n], l, ascending: the first to end is first
    usage: NDArray[np.int64]  # [n], slots in use when each ends, of itself and of all after it

    @classmethod
    def of(cls, lengths: Lengths) -> "FutureKV":
        """Return the future of requests and their siblings; c counts all known tokens that need KV.

        KV that several hold belongs to the last of them to end.
        """
        remaining, current = lengths.remaining, lengths.known - 1
        shared = borrowed_by_last(lengths.kin.values(), attrgetter("num_remaining_tokens"))
        for place, view in lengths.kin.items():
            current[place] += shared.get(view.request_id, 0) - view.num_borrowed_tokens
        if siblings := [v.num_remaining_tokens for v in lengths.kin.values() for _ in range(v.num_siblings)]:
            remaining = np.concatenate((remaining, siblings))
            current = np.concatenate((current, np.zeros_like(siblings)))
        order = remaining.argsort(kind="stable")
        remaining, current = remaining[order], current[order]
        num_alive = np.arange(len(remaining), 0, -1)
        return cls(remaining, remaining * num_alive + current[::-1].cumsum()[::-1])

    @property
    def peak(self) -> int:
        """Return the most slots ever in use at once."""
        return int(self.usage.max(initial=0))

    @cached_property
    def _most_until(self) -> NDArray[np.int64]:
        """The most of `remaining` + `usage` until each request ends."""
        return np.maximum.accumulate(self.remaining + self.usage)

    @cached_property
    def _most_from(self) -> NDArray[np.int64]:
        """The most slots in use when each request ends, and later."""
        return np.maximum.accumulate(self.usage[::-1])[::-1]

    def adding(self, view: RequestView) -> "FutureKV":
        """Return the future with one more request, which shares nothing yet, and its siblings."""
        future = self._adding(view.num_remaining_tokens, view.num_known_tokens - 1)
        for _ in range(view.num_siblings):
            future = future._adding(view.num_remaining_tokens, 0)
        return future

    def peak_with(self, view: RequestView) -> int:
        """Return the peak with one more request, which shares nothing yet, and its siblings."""
        future, num_remaining, num_current = self, view.num_remaining_tokens, view.num_known_tokens - 1
        for _ in range(view.num_siblings):
            future = future._adding(num_remaining, 0)
        index, own = future._usage_at_end_of(num_remaining, num_current)
        before = num_current + (int(future._most_until[index - 1]) if index else 0)
        after = int(future._most_from[index]) if index < len(future.usage) else 0
        return max(own, before, after)

    def _adding(self, num_remaining: int, num_current: int) -> "FutureKV":
        index, own = self._usage_at_end_of(num_remaining, num_current)
        remaining, usage = np.empty((2, len(self.remaining) + 1), np.int64)
        remaining[:index], remaining[index] = self.remaining[:index], num_remaining
        remaining[index + 1 :], usage[index + 1 :] = self.remaining[index:], self.usage[index:]
        usage[:index], usage[index] = self.remaining[:index] + self.usage[:index] + num_current, own
        return FutureKV(remaining, usage)

    def _usage_at_end_of(self, num_remaining: int, num_current: int) -> tuple[int, int]:
        """Return how many others end before one more request, and the slots in use at its end."""
        index = int(self.remaining.searchsorted(num_remaining))
        num_after = len(self.remaining) - index
        held = int(self.usage[index] - self.remaining[index] * num_after) if num_after else 0
        return index, held + num_current + num_remaining * (num_after + 1)
