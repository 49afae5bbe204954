from hypothesis import given
from hypothesis import strategies as st

from loong.attention.local import joined, tables_of, tasks_of
from loong.core.plan import QueryBlock, Transfer
from loong.kernels.attend_task import AttendTask
from loong.model.device import CpuDevice

stripes = st.builds(
    lambda first, step, count: range(first, first + step * count, step),
    st.integers(0, 20),
    st.integers(1, 4),
    st.integers(0, 9),
)
blocks = stripes.filter(bool).map(lambda positions: QueryBlock("a", positions, 0, Transfer.KV))


def pairs(task: AttendTask, window: int | None = None) -> set[tuple[int, int]]:
    """Return the query rows and key rows of a task that meet."""
    return {
        (task.query_row + i, task.key_row + j)
        for i in range(task.num_queries)
        for j in range(task.num_keys)
        for distance in (task.first_query + i * task.query_step - task.first_key - j * task.key_step,)
        if distance >= 0 and (window is None or distance < window)
    }


@given(blocks, st.lists(stripes, max_size=4))
def test_the_tasks_of_a_block_meet_every_key_up_to_each_query_once(
    block: QueryBlock, kv: list[range]
) -> None:
    keys = [position for positions in kv for position in positions]
    met = [pair for task in tasks_of(block, 10, 50, kv) for pair in pairs(task)]
    assert sorted(met) == [
        (10 + i, 50 + j)
        for i, query in enumerate(block.positions)
        for j, key in enumerate(keys)
        if key <= query
    ]


@given(blocks, st.lists(stripes, max_size=4), st.integers(1, 30))
def test_with_a_window_they_meet_the_last_keys_and_have_none_before_the_first_querys(
    block: QueryBlock, kv: list[range], window: int
) -> None:
    keys = [position for positions in kv for position in positions]
    tasks = tasks_of(block, 10, 50, kv, window)
    assert sorted(pair for task in tasks for pair in pairs(task, window)) == [
        (10 + i, 50 + j)
        for i, query in enumerate(block.positions)
        for j, key in enumerate(keys)
        if query - window < key <= query
    ]
    assert all(task.first_key > block.positions[0] - window for task in tasks)


@given(st.lists(st.tuples(blocks, st.lists(stripes, max_size=4)), max_size=4))
def test_tables_hold_all_tasks_and_no_query_twice(cases: list[tuple[QueryBlock, list[range]]]) -> None:
    tasks = [tasks_of(block, 100 * i, 0, kv) for i, (block, kv) in enumerate(cases)]
    tables = [
        [AttendTask(*line) for line in table.turns[0].tolist()] for table in tables_of(tasks, CpuDevice())
    ]
    assert sorted(task for table in tables for task in table) == sorted(t for each in tasks for t in each)
    for table in tables:
        assert len({task.query_row for task in table}) == len(table)
    assert len(tables) == max(map(len, tasks), default=0)


def test_keys_that_all_queries_see_make_one_task() -> None:
    block = QueryBlock("a", range(40, 44), 0, Transfer.KV)
    history = [range(0, 20, 2), range(1, 20, 2), range(20, 40)]
    assert tasks_of(block, 0, 5, [*history, range(40, 44)]) == (
        AttendTask.full(0, 4, 5, 40),
        AttendTask.causal(0, range(40, 44), 45, range(40, 44)),
    )


@given(blocks, st.lists(st.tuples(st.integers(1, 3), st.lists(stripes, max_size=3)), max_size=4))
def test_joined_tasks_meet_the_same_pairs_in_no_more_tasks(
    block: QueryBlock, parts: list[tuple[int, list[range]]]
) -> None:
    """Blocks of one request on several masters follow each other, and see the keys of its history."""
    tasks: list[AttendTask] = []
    for number, (num_keys, kv) in enumerate(parts):
        row = number * len(block.positions)
        tasks += [AttendTask.full(row, len(block.positions), 0, num_keys)]
        tasks += tasks_of(block, 100 + row, 50, kv)
    by_one_table = joined(tasks)
    assert sorted(pair for task in by_one_table for pair in pairs(task)) == sorted(
        pair for task in tasks for pair in pairs(task)
    )
    assert len(by_one_table) <= len(tasks)


def test_full_tasks_of_adjoining_queries_become_one() -> None:
    tasks = [AttendTask.full(0, 3, 7, 9), AttendTask.full(3, 2, 7, 9), AttendTask.full(6, 1, 7, 9)]
    assert joined(tasks) == [AttendTask.full(0, 5, 7, 9), AttendTask.full(6, 1, 7, 9)]


def test_tasks_whose_queries_have_positions_are_not_joined() -> None:
    """Each query of the second sees fewer keys than as one behind the first."""
    tasks = [AttendTask.causal(row, range(5, 8), 0, range(9)) for row in (0, 3)]
    assert joined(tasks) == tasks
