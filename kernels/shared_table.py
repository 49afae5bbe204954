"""Groups of queries that attend the same KV, as tables in device memory."""

from typing import NamedTuple

from torch import Tensor


class SharedTable(NamedTuple):
    """Queries of groups, and the slots of each group, so that a captured graph follows their changes.

    Queries of a group follow each other in `rows`; rows below 0 belong to no query. A query is in at most one
    group of each level. Tasks of level l name places l * N and on of `rows`, and keys of `slots`; every query
    of a task sees all its keys.
    """

    rows: Tensor  # [N] int64, of the queries
    num_levels: int
    tasks: Tensor  # [C, 8] int64, lines of `AttendTask`; those without queries are skipped
    slots: Tensor  # [S] int64
