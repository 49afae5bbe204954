"""The published policy's equations: LoongServe (SOSP'24), by their numbers there.

What a request waits counts as seconds for each of its tokens, so short requests count most. The seconds
are for the caller to predict.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import inf
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from loong.core.request import RequestView
from loong.scheduler.common.request_lengths import Lengths
from loong.scheduler.common.shared_prompts import shared_by_last


def paper_weight(num_input_tokens: int) -> float:
    """What a second of a prefill counts for one of its prompts: its share in (2), (3), (4) and (5)."""
    return 1 / num_input_tokens


def dispatch_cost(prefill_time: float, num_output_tokens: Iterable[int]) -> float:
    """(1): what a prefill on the instances of a decode batch costs that batch, which waits for it.

    `prefill_time` is T(R_p + R'_i, E_p + G_i), in seconds: all prompts chosen, on all idle instances and the
    batch's; `num_output_tokens` is that of each request in the batch.
    """
    return sum(prefill_time / num_tokens for num_tokens in num_output_tokens)


def dispatch_gain(
    avg_decode_time: float, decode_times: Iterable[float], num_input_tokens: Iterable[int]
) -> float:
    """(2): what prompts R'_i gain that need not wait for a decode batch to end. Do so if above (1).

    In seconds, `avg_decode_time` is how long a request decodes, and `decode_times` for how long those in the
    batch, at least one, have; `num_input_tokens` is that of each prompt.
    """
    wait = max(0.0, avg_decode_time - min(decode_times))
    return sum(wait * paper_weight(num_tokens) for num_tokens in num_input_tokens)


def allocation_gain(prefill_time: float, wider_prefill_time: float, num_input_tokens: Iterable[int]) -> float:
    """(3): what prompts R_p gain if e_min, the decode instance with least KV, joins their prefill.

    The times are T(R_p, E_p) and T(R_p, E_p + e_min), in seconds.
    """
    saved = prefill_time - wider_prefill_time
    return sum(saved * paper_weight(num_tokens) for num_tokens in num_input_tokens)


def allocation_cost(migration_time: float, num_input_tokens: Iterable[int]) -> float:
    """(4): what it costs prompts R_p to wait until e_min is free. Join it unless above (3).

    `migration_time` is seconds to move its KV away, V(e_min) over the bandwidth.
    """
    return sum(migration_time * paper_weight(num_tokens) for num_tokens in num_input_tokens)


@dataclass(frozen=True, eq=False)
class FutureKV:
    """The slots that requests will use if each goes on to its declared end and then frees its own.

    A request with c tokens in slots and l to come has c + t after t steps and is gone after step l. With the
    longest-lived first, the most ever in use is max over k of l_k k + sum of c_i for i <= k: the k-th ends,
    and no one before it has. Admission admits while that is within capacity, so nobody is ever evicted.
    """

    remaining: NDArray[np.int64]  # [n], l, ascending: the first to end is first
    usage: NDArray[np.int64]  # [n], slots in use when each ends, of itself and of all after it

    @classmethod
    def of(cls, lengths: Lengths) -> "FutureKV":
        """Of requests and their siblings: c is all of the known tokens that need KV, computed or not.

        KV that several hold is that of the last of them to end.
        """
        remaining, current = lengths.remaining, lengths.known - 1
        shared = shared_by_last(lengths.kin.values(), attrgetter("num_remaining_tokens"))
        for place, view in lengths.kin.items():
            current[place] += shared.get(view.request_id, 0) - view.shared.num_tokens
        if siblings := [v.num_remaining_tokens for v in lengths.kin.values() for _ in range(v.num_siblings)]:
            remaining = np.concatenate((remaining, siblings))
            current = np.concatenate((current, np.zeros_like(siblings)))
        order = remaining.argsort(kind="stable")
        remaining, current = remaining[order], current[order]
        num_alive = np.arange(len(remaining), 0, -1)
        return cls(remaining, remaining * num_alive + current[::-1].cumsum()[::-1])

    @property
    def peak(self) -> int:
        """The most slots ever in use at once."""
        return self._busiest[1]

    @cached_property
    def _busiest(self) -> tuple[int, int]:
        """After how many steps the most slots are in use, and how many."""
        if not len(self.usage):
            return 0, 0
        place = int(self.usage.argmax())
        return int(self.remaining[place]), int(self.usage[place])

    def adding(self, view: RequestView) -> "FutureKV":
        """With one more request, which shares nothing yet, and its siblings."""
        future = self._adding(view.num_remaining_tokens, view.num_known_tokens - 1)
        for _ in range(view.num_siblings):
            future = future._adding(view.num_remaining_tokens, 0)
        return future

    def peak_with(self, view: RequestView, limit: float = inf) -> int:
        """The peak if one more request were added, or if that is above `limit`, something above it."""
        future, num_remaining, num_current = self, view.num_remaining_tokens, view.num_known_tokens - 1
        step, peak = self._busiest
        if num_remaining >= step and (at_peak := peak + num_current + step) > limit:
            return at_peak  # it is there then: no need to look at other steps
        for _ in range(view.num_siblings):
            future = future._adding(num_remaining, 0)
        index, own = future._usage_at_end_of(num_remaining, num_current)
        before = future.remaining[:index] + future.usage[:index]
        after = future.usage[index:]
        return int(max(own, before.max(initial=0) + num_current, after.max(initial=0)))

    def _adding(self, num_remaining: int, num_current: int) -> "FutureKV":
        index, own = self._usage_at_end_of(num_remaining, num_current)
        remaining, usage = np.empty((2, len(self.remaining) + 1), np.int64)
        remaining[:index], remaining[index] = self.remaining[:index], num_remaining
        remaining[index + 1 :], usage[index + 1 :] = self.remaining[index:], self.usage[index:]
        usage[:index], usage[index] = self.remaining[:index] + self.usage[:index] + num_current, own
        return FutureKV(remaining, usage)

    def _usage_at_end_of(self, num_remaining: int, num_current: int) -> tuple[int, int]:
        """Before how many others one more does not end, and the slots in use when it ends."""
        index = int(self.remaining.searchsorted(num_remaining))
        num_after = len(self.remaining) - index
        held = int(self.usage[index] - self.remaining[index] * num_after) if num_after else 0
        return index, held + num_current + num_remaining * (num_after + 1)
