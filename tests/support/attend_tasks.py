"""Tasks of attention of all kinds, and the pairs of queries and keys that meet in them."""

from collections.abc import Sequence

import torch
from hypothesis import strategies as st

from loong.kernels.attend_task import AttendTask

stripes = st.builds(
    lambda first, step, count: range(first, first + step * count, step),
    st.integers(0, 40),
    st.integers(1, 4),
    st.integers(1, 40),
)
full_tasks = st.builds(AttendTask.full, st.just(0), st.integers(1, 30), st.integers(0, 5), st.integers(1, 30))
causal_tasks = st.builds(AttendTask.causal, st.just(0), stripes, st.integers(0, 5), stripes)


def pairs_of_tasks(tasks: Sequence[AttendTask]) -> list[tuple[int, int]]:
    """Return every query row and key row that meet, as often as they do."""
    met = []
    for task in tasks:
        queries = task.first_query + task.query_step * torch.arange(task.num_queries)
        keys = task.first_key + task.key_step * torch.arange(task.num_keys)
        rows = (keys <= queries[:, None]).nonzero() + torch.tensor([task.query_row, task.key_row])
        met += [(int(query), int(key)) for query, key in rows]
    return sorted(met)
