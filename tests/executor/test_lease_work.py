from dataclasses import replace
from unittest.mock import ANY

from hypothesis import given
from hypothesis import strategies as st
from plans import decode

from loong.core.cost.work import step_work
from loong.core.placement import KVSegment, Placement, striped
from loong.core.request import RequestView
from loong.executor.lease_work import LeaseWork

GROUP = (0, 1, 2)
ALL_INSTANCES = (*GROUP, 3, 4)


@st.composite
def leases(draw: st.DrawFn) -> list[tuple[RequestView, int, int]]:
    """Return decoding requests, the master of each, and the step after which it leaves."""
    entries = []
    for number in range(draw(st.integers(1, 5))):
        holders = draw(st.lists(st.sampled_from(ALL_INSTANCES), min_size=1, unique=True))
        num_cached = draw(st.integers(1, 40))
        placement = striped(f"r{number}", range(num_cached), tuple(holders))
        view = RequestView(f"r{number}", num_cached, 1, 99, 0.0, None, placement)
        entries.append((view, draw(st.sampled_from(GROUP)), draw(st.integers(1, 6))))
    return entries


@given(leases())
def test_a_lease_grows_and_shrinks_to_the_work_that_each_step_counted_afresh_has(
    entries: list[tuple[RequestView, int, int]],
) -> None:
    masters = {view.request_id: master for view, master, _ in entries}
    views = [view for view, _, _ in entries]
    plan = decode(views, GROUP, masters, num_steps=8)
    work = LeaseWork(plan, {view.request_id: view.placement for view in views})
    for step in range(7):
        live = [view for view, _, last in entries if last > step]
        at_step = plan.at_step(step, (view.request_id for view in live))
        grown = {view.request_id: grown_by(view, masters[view.request_id], step) for view in live}
        counted = step_work(at_step, grown)
        assert work.step.has_exchange == counted.has_exchange
        assert work.step.is_first == (step == 0)
        for instance_id, expected in counted.instances.items():
            assert work.step.instances[instance_id] == replace(expected, num_segments=ANY)
        assert work.step.holders == {
            instance_id: replace(expected, num_segments=ANY)
            for instance_id, expected in counted.holders.items()
        }
        work.take_step()
        for view, _, last in entries:
            if last == step + 1:
                work.leave(view.request_id)


def grown_by(view: RequestView, master_id: int, num_steps: int) -> Placement:
    """Return the placement of a request after `num_steps` of its lease."""
    first = view.num_computed_tokens
    made = range(first, first + num_steps)
    return view.placement.adding([KVSegment(view.request_id, made, master_id)] if made else [])
