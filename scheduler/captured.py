"""Which steps with a prompt a worker starts as one, and not kernel by kernel."""

from dataclasses import dataclass

from loong.core.work import InstanceWork

_ALWAYS_ROWS = 256  # with fewer, however many keys they meet
_KEYS_A_ROW = 2  # however many rows


@dataclass(frozen=True, slots=True)
class CapturedSteps:
    """Steps of up to so many tokens that an instance computes in which no KV travels.

    Behind long histories GPUs work longer than hosts take to start kernels: there, tokens times keys are at
    most `most_pairs`, or `most_pairs_in_group`. And steps in which nothing but KV travels, up to
    `most_kv_rows` from each instance.
    """

    most_rows: int
    most_pairs: int
    most_pairs_in_group: int
    most_kv_rows: int

    def has(self, work: InstanceWork) -> bool:
        """Whether such a step is one of these, as far as one instance of the group can tell."""
        if work.num_hops:
            return self._has_ring(work)
        num_rows = work.num_tokens
        if num_rows > self.most_rows:
            return False
        most_pairs = self.most_pairs_in_group if work.num_sent_queries else self.most_pairs
        return (
            num_rows < _ALWAYS_ROWS
            or work.num_keys <= _KEYS_A_ROW * num_rows
            or num_rows * work.num_keys <= most_pairs
        )

    def _has_ring(self, work: InstanceWork) -> bool:
        """Of the others it is only known how many rows they bring on average."""
        if work.num_decode_keys or work.num_sent_queries or work.num_ring_blocks < work.num_blocks:
            return False
        num_own = max(work.num_tokens, work.num_keys - work.num_ring_keys)
        return max(num_own, work.num_ring_keys / work.num_hops) <= self.most_kv_rows


NOTHING_CAPTURED = CapturedSteps(0, 0, 0, 0)
