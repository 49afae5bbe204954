"""Which steps with a prompt a worker starts as one, and not kernel by kernel."""

from dataclasses import dataclass

from loong.core.work import InstanceWork

_LEAST_COPIED = 256  # rows, whose keys may be copied
_KEYS_A_ROW = 2  # of what is copied
_LEAST_TILED = 256  # queries of a key on average, from which a library attends quicker
_PAIRS_A_ROW = 1 << 14  # as many take what else is computed of a row


@dataclass(frozen=True, slots=True)
class CapturedSteps:
    """Steps of up to so many tokens that an instance computes in which no KV travels.

    Of up to `most_prompts`, which are not told from decodes where there are some. Behind long histories GPUs
    work longer than hosts take to start kernels: there, unless it is few queries that meet a key, pairs, with
    what else is computed, are at most `most_pairs`. And steps in which nothing but KV travels, up to
    `most_kv_rows` from each instance.
    """

    most_rows: int
    most_prompts: int
    most_pairs: int
    most_kv_rows: int

    def has(self, work: InstanceWork) -> bool:
        """Whether such a step is one of these, as far as one instance of the group can tell."""
        if work.num_hops:
            return self._has_ring(work)
        num_rows, num_keys = work.num_tokens, work.num_keys
        if num_rows > self.most_rows or (work.num_blocks > self.most_prompts and not work.num_decode_keys):
            return False
        return (
            (num_rows >= _LEAST_COPIED and num_keys <= _KEYS_A_ROW * num_rows)
            or work.num_pairs < _LEAST_TILED * num_keys
            or work.num_pairs + _PAIRS_A_ROW * num_rows <= self.most_pairs
        )

    def _has_ring(self, work: InstanceWork) -> bool:
        """Of the others it is only known how many rows they bring on average."""
        if work.num_decode_keys or work.num_sent_queries or work.num_ring_blocks < work.num_blocks:
            return False
        num_own = max(work.num_tokens, work.num_keys - work.num_ring_keys)
        return max(num_own, work.num_ring_keys / work.num_hops) <= self.most_kv_rows


NOTHING_CAPTURED = CapturedSteps(0, 0, 0, 0)
