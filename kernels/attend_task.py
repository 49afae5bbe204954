"""Which rows of queries attend which rows of KV, and what the causal mask leaves of it."""

from typing import NamedTuple


class AttendTask(NamedTuple):
    """One line of a table [C, 8] int64 in device memory, made by `torch.tensor(tasks)`.

    Query i of the task sees key j iff `first_key + j * key_step <= first_query + i * query_step`.
    """

    query_row: int
    num_queries: int
    key_row: int  # among the rows of the KV, or of the list of slots
    num_keys: int
    first_query: int  # positions in the sequence
    query_step: int
    first_key: int
    key_step: int

    @classmethod
    def full(cls, query_row: int, num_queries: int, key_row: int, num_keys: int) -> "AttendTask":
        """Every query sees every key."""
        return cls(query_row, num_queries, key_row, num_keys, num_keys, 0, 0, 1)

    @classmethod
    def causal(
        cls, query_row: int, query_positions: range, key_row: int, key_positions: range
    ) -> "AttendTask":
        """Queries see keys of their own position and before; the ranges ascend."""
        queries, keys = query_positions, key_positions
        return cls(
            query_row,
            len(queries),
            key_row,
            len(keys),
            queries.start,
            queries.step,
            keys.start,
            keys.step,
        )
