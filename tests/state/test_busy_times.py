"""Busy times are the lengths of the union of batches, and of the overlaps of prompt groups."""

from hypothesis import given
from hypothesis import strategies as st

from loong.core.instance import ESPGroup
from loong.core.placement import striped
from loong.core.plan import BatchPlan, QueryBlock, Transfer
from loong.core.positions import stripe
from loong.state.busy_times import BusyTimes

SPANS = st.tuples(st.integers(0, 20), st.integers(1, 8), st.integers(1, 3), st.sampled_from([1, 12]))


def plan(dop: int, num_tokens: int) -> BatchPlan:
    positions, members = range(num_tokens), tuple(range(dop))
    blocks = (QueryBlock("r", stripe(positions, i, dop), i, Transfer.KV) for i in members[:num_tokens])
    return BatchPlan(ESPGroup(members), tuple(blocks), striped("r", positions, members).segments)


@given(st.lists(SPANS, max_size=6))
def test_times_are_those_of_an_integral_over_every_second(
    spans: list[tuple[int, int, int, int]],
) -> None:
    times, changes = BusyTimes(), list[tuple[int, bool, int]]()
    for batch_id, (begin, length, _, _) in enumerate(spans):
        changes += [(begin, True, batch_id), (begin + length, False, batch_id)]
    for time, begins, batch_id in sorted(changes):
        if begins:
            times.start(batch_id, plan(*spans[batch_id][2:]), float(time))
        else:
            times.end(batch_id, float(time))
    running = [[span for span in spans if span[0] <= second < span[0] + span[1]] for second in range(40)]
    prompt_groups = [[span for span in found if span[2] > 1 and span[3] > 1] for found in running]
    assert times.busy == sum(map(bool, running))
    assert times.two_prompt_groups == sum(len(found) > 1 for found in prompt_groups)


def test_the_end_of_a_batch_that_never_started_changes_nothing() -> None:
    times = BusyTimes()
    times.end(7, 3.0)
    assert (times.busy, times.two_prompt_groups) == (0.0, 0.0)
