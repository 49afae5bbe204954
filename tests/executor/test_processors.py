from math import inf

from hypothesis import given
from hypothesis import strategies as st

from loong.executor.processors import Processors


def ends(processors: Processors) -> list[tuple[int, float]]:
    """Return the remaining steps, in the order in which they end."""
    reported = []
    while (time := processors.next_end) < inf:
        reported.append((processors.end(), time))
    return reported


def test_steps_on_devices_of_their_own_take_their_time() -> None:
    processors = Processors()
    processors.start(1, 10.0, 3.0, num_instances=4)
    processors.start(2, 11.0, 1.0, num_instances=4)
    assert ends(processors) == [(2, 12.0), (1, 13.0)]


def test_two_steps_on_one_core_run_at_half_speed_until_one_ends() -> None:
    processors = Processors(num_cores=1)
    processors.start(1, 0.0, 3.0, num_instances=1)
    processors.start(2, 1.0, 1.0, num_instances=1)
    assert ends(processors) == [(2, 3.0), (1, 4.0)]


def test_a_group_with_more_processes_than_cores_slows_itself_down() -> None:
    processors = Processors(num_cores=2, processes_per_instance=2)
    processors.start(1, 0.0, 1.0, num_instances=4)
    assert ends(processors) == [(1, 4.0)]


def test_a_step_that_is_cancelled_gives_its_cores_back() -> None:
    processors = Processors(num_cores=1)
    processors.start(1, 0.0, 2.0, num_instances=1)
    processors.start(2, 0.0, 9.0, num_instances=1)
    processors.cancel(2, 2.0)
    assert ends(processors) == [(1, 3.0)]


@given(
    st.lists(st.tuples(st.floats(0, 5), st.floats(0.1, 5), st.integers(1, 4)), min_size=1, max_size=8),
    st.integers(1, 6),
)
def test_cores_do_all_the_work_and_no_more_than_they_can(
    steps: list[tuple[float, float, int]], num_cores: int
) -> None:
    processors, now = Processors(num_cores), 0.0
    reported: list[tuple[int, float]] = []
    for batch_id, (gap, seconds, num_instances) in enumerate(steps):
        now += gap
        while (time := processors.next_end) <= now:
            reported.append((processors.end(), time))
        processors.start(batch_id, now, seconds, num_instances)
    reported += ends(processors)
    assert sorted(batch_id for batch_id, _ in reported) == list(range(len(steps)))
    assert [time for _, time in reported] == sorted(time for _, time in reported)
    work = sum(seconds * num_instances for _, seconds, num_instances in steps)
    assert reported[-1][1] * num_cores >= work * (1 - 1e-9)
    for batch_id, time in reported:
        start = sum(gap for gap, _, _ in steps[: batch_id + 1])
        assert time >= (start + steps[batch_id][1]) * (1 - 1e-9)


def test_a_step_that_is_delayed_ends_later_by_as_much_and_others_do_not() -> None:
    processors = Processors()
    processors.start(1, 0.0, 3.0, num_instances=1)
    processors.start(2, 0.0, 4.0, num_instances=1)
    processors.delay(1, 1.5)
    processors.delay(1, 0.25)
    assert ends(processors) == [(2, 4.0), (1, 4.75)]


def test_a_delay_is_gone_with_the_step_that_it_was_of() -> None:
    processors = Processors()
    processors.start(1, 0.0, 2.0, num_instances=1)
    processors.start(2, 0.0, 3.0, num_instances=1)
    processors.delay(2, 5.0)
    processors.cancel(2, 1.0)
    processors.start(2, 1.0, 3.0, num_instances=1)
    assert ends(processors) == [(1, 2.0), (2, 4.0)]
