from itertools import accumulate, chain

from attend_tasks import causal_tasks, full_tasks, pairs_of_tasks
from hypothesis import given
from hypothesis import strategies as st

from loong.kernels.attend_task import AttendTask
from loong.model.short_kernels import SHORT_ROWS, keys_of_turn, short_width, turns_of

MOST_OUTPUTS = SHORT_ROWS * short_width(SHORT_ROWS)

long_tasks = st.builds(
    AttendTask.full, st.just(0), st.integers(1, 5000), st.just(0), st.integers(0, 10 * short_width(1000))
)


@given(st.integers(1, 20_000))
def test_fewer_rows_are_wider_and_no_more_work(num_rows: int) -> None:
    assert min(num_rows, SHORT_ROWS) * short_width(num_rows) <= MOST_OUTPUTS
    assert short_width(num_rows + 1) <= short_width(num_rows)


@given(st.lists(full_tasks | causal_tasks), st.integers(1, 30))
def test_turns_have_every_pair_once_and_few_keys_of_each_task(
    tasks: list[AttendTask], most_keys: int
) -> None:
    turns = turns_of(tasks, most_keys)
    assert pairs_of_tasks([*chain.from_iterable(turns)]) == pairs_of_tasks(tasks)
    for turn in turns:
        assert all(task.num_keys <= most_keys for task in turn)
        assert len(turn) <= len(tasks)
    assert len(turns) == max((-(-task.num_keys // most_keys) for task in tasks), default=0)


@given(st.lists(long_tasks))
def test_turns_are_short_for_all_their_queries_and_no_shorter_than_need_be(tasks: list[AttendTask]) -> None:
    most_keys = keys_of_turn(tasks)
    turns = turns_of(tasks, most_keys)
    assert all(map(is_short, turns))
    if is_short(tasks):
        assert len(turns) <= 1
    else:
        assert most_keys >= short_width(sum(task.num_queries for task in tasks))


def is_short(tasks: list[AttendTask]) -> bool:
    """Return whether no task has more keys than is short for the queries of all that have as many."""
    ordered = sorted(tasks, key=lambda task: -task.num_keys)
    numbers = accumulate(task.num_queries for task in ordered)
    return all(task.num_keys <= short_width(number) for task, number in zip(ordered, numbers, strict=True))
