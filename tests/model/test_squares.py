import torch
from hypothesis import given
from hypothesis import strategies as st

from loong.kernels.attend_task import AttendTask
from loong.model.squares import Square, cut_squares

stripes = st.builds(
    lambda first, step, count: range(first, first + step * count, step),
    st.integers(0, 5),
    st.integers(1, 4),
    st.integers(1, 30),
)


def pairs(tasks: tuple[AttendTask, ...], squares: tuple[Square, ...] = ()) -> list[tuple[int, int]]:
    """Every query row and key row that meet, as often as they do."""
    met = []
    for task in tasks:
        queries = task.first_query + task.query_step * torch.arange(task.num_queries)
        keys = task.first_key + task.key_step * torch.arange(task.num_keys)
        rows = (keys <= queries[:, None]).nonzero() + torch.tensor([task.query_row, task.key_row])
        met += [(int(query), int(key)) for query, key in rows]
    for square in squares:
        met += [(square.query_row + i, square.key_row + j) for i in range(square.size) for j in range(i + 1)]
    return sorted(met)


@given(st.lists(st.tuples(stripes, stripes), max_size=3), st.integers(1, 9))
def test_squares_and_the_rest_are_what_they_were_cut_from(
    blocks: list[tuple[range, range]], step: int
) -> None:
    tasks = tuple(
        AttendTask.causal(100 * i, queries, 100 * i + 7, keys) for i, (queries, keys) in enumerate(blocks)
    )
    squares, rest = cut_squares(tasks, step)
    assert pairs(rest, squares) == pairs(tasks)


def test_the_stripes_of_a_ring_are_all_but_squares() -> None:
    own, behind = AttendTask.causal(3, range(1, 81, 4), 5, range(1, 81, 4)), range(2, 82, 4)
    assert cut_squares([own], 8)[0] == (Square(3, 5, 16),)
    ahead = AttendTask.causal(3, range(1, 81, 4), 5, behind)
    assert cut_squares([ahead], 8)[0] == (Square(4, 5, 16),)
    assert cut_squares([AttendTask.full(0, 16, 0, 16)], 8)[0] == ()
