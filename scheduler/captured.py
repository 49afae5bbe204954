"""Which steps with a prompt a worker starts as one, and not kernel by kernel."""

from dataclasses import dataclass

from loong.core.work import InstanceWork

_ALWAYS_ROWS = 256  # with fewer, however many keys they meet
_KEYS_A_ROW = 2  # however many rows


@dataclass(frozen=True, slots=True)
class CapturedSteps:
    """Steps of up to so many tokens that an instance computes, alone or in a group, in which no KV travels.

    Behind long histories GPUs work longer than hosts take to start kernels: there, tokens times keys are at
    most `most_pairs`.
    """

    most_rows: int
    most_rows_in_group: int
    most_pairs: int

    def has(self, work: InstanceWork) -> bool:
        """Whether such a step is one of these, as far as one instance of the group can tell."""
        num_rows = work.num_tokens
        most_rows = self.most_rows_in_group if work.num_sent_queries else self.most_rows
        if work.num_hops or num_rows > most_rows:
            return False
        return (
            num_rows < _ALWAYS_ROWS
            or work.num_keys <= _KEYS_A_ROW * num_rows
            or num_rows * work.num_keys <= self.most_pairs
        )


NOTHING_CAPTURED = CapturedSteps(0, 0, 0)
