"""Tasks of attention: rows of queries, rows of KV, and the causal mask between them."""

from typing import NamedTuple


class AttendTask(NamedTuple):
    """One line of a table [C, 8] int64 in device memory, made by `torch.tensor(tasks)`.

    Query i of the task sees key j if and only if `first_key + j * key_step <= first_query + i * query_step`.
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
        """Return a task in which every query sees every key."""
        return cls(query_row, num_queries, key_row, num_keys, num_keys, 0, 0, 1)

    @classmethod
    def causal(
        cls, query_row: int, query_positions: range, key_row: int, key_positions: range
    ) -> "AttendTask":
        """Return a task in which queries see keys up to their own position. Both ranges ascend."""
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
