"""The queue of groups names, for one prompt after the other, the group that a look at all of them would."""

from hypothesis import given
from hypothesis import strategies as st
from snapshots import waiting

from loong.scheduler.common.planning_view import InstanceSet
from loong.scheduler.esp.admission import PrefillCandidate
from loong.scheduler.esp.group import Group
from loong.scheduler.esp.group_queue import GroupQueue

LEAST_LONG, FULL = 0.8, 0.1


def prompt(rank: int, work: float, *, is_deferred: bool = False) -> PrefillCandidate:
    view = waiting(f"r{rank}", 1 + int(1000 * work))
    return PrefillCandidate(
        view, view.num_prompt_tokens, 0, work, 1.0, 1.0, is_deferred=is_deferred, rank=rank
    )


def by_a_look_at_all(groups: list[Group], prefill: PrefillCandidate, demand: int) -> Group | None:
    return min(
        (group for group in groups if group.spare >= demand),
        key=lambda g: (
            g.wait_of(prefill) + (FULL if g.longest > LEAST_LONG else prefill.work),
            g.num_decodes / g.dop,
            -g.spare,
        ),
        default=None,
    )


works = st.sampled_from([0.01, 0.05, 0.3, 2.0])


@st.composite
def groups(draw: st.DrawFn) -> list[Group]:
    """Some busy, some with prompts that have begun, of all ranks, some with little room."""
    made = []
    for first_id in range(draw(st.integers(1, 5))):
        instance_set = InstanceSet((10 * first_id, 10 * first_id + 1)[: draw(st.integers(1, 2))])
        instance_set.available_in = draw(st.sampled_from([0.0, 0.02, 0.3]))
        instance_set.num_decodes = draw(st.integers(0, 3))
        ranks = sorted(draw(st.sets(st.integers(0, 20), max_size=2)))
        begun = [prompt(2 * rank, draw(works), is_deferred=draw(st.booleans())) for rank in ranks]
        made.append(Group([instance_set], begun, draw(st.sampled_from([0, 100, 700, 5000]))))
    return made


@given(groups(), st.lists(st.tuples(st.sampled_from([0.01, 0.05, 0.3]), st.integers(0, 800)), max_size=20))
def test_the_queue_names_the_group_that_a_look_at_all_would(
    groups: list[Group], shorts: list[tuple[float, int]]
) -> None:
    soonest = GroupQueue(groups, LEAST_LONG, FULL)
    for number, (work, demand) in enumerate(shorts):
        prefill = prompt(2 * number + 1, work)
        group = soonest.group_for(prefill, demand)
        assert group is by_a_look_at_all(groups, prefill, demand)
        if group is not None:
            group.add(prefill, demand)
            assert [p.rank for p in group.prefills] == sorted(p.rank for p in group.prefills)
            assert group.spare >= 0


@given(groups())
def test_a_prompt_waits_for_all_that_is_due_before_it_and_not_late(groups: list[Group]) -> None:
    for group in groups:
        for rank in range(0, 45, 3):
            before = sum(p.work for p in group.prefills if p.rank < rank and not p.is_deferred)
            waited = group.wait_of(prompt(rank, 0.01))
            assert abs(waited - group.available_in - before / group.dop) < 1e-9
