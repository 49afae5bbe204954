"""The next batch of a group: leases with room, prompts that go on, and decodes that keep their pace."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from drafts import admitted_draft
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from machines import CPU, DEAR, H200
from snapshots import begun, decoding, snapshot_of, waiting

from loong.core.check_plan import check_plan
from loong.core.cost.cost_model import CostModel
from loong.core.plan import BatchPlan, IterationPlan, Transfer
from loong.core.request import SLO, RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.config import PolicyConfig
from loong.scheduler.esp.batching import BatchBuilder
from loong.scheduler.esp.prompt_order import PrefillCandidate
from loong.scheduler.tuning import MIN_CHUNK_TOKENS, MIN_TPOT_SHARE, PLANNED_TPOT_SHARE

MODELS = {"cpu": CPU, "h200": H200, "dear": DEAR}


@dataclass(frozen=True)
class WholeCluster:
    """The whole cluster as one group, which computes all prompts."""

    builder: BatchBuilder
    prefills: Sequence[PrefillCandidate]

    @property
    def decodes(self) -> Sequence[RequestView]:
        return self.builder.draft.view.decodes

    def batch(self) -> BatchPlan | None:
        instance_ids = tuple(sorted(self.builder.draft.view.free))
        if self.prefills:
            return self.builder.with_prompts(instance_ids, self.decodes, self.prefills)
        return self.builder.lease(instance_ids, self.decodes)


def group_of(
    snapshot: Snapshot, cost_model: CostModel, config: PolicyConfig, *, late_ids: Sequence[str] = ()
) -> WholeCluster:
    draft = replace(admitted_draft(snapshot, cost_model, config), lease_steps=config.lease_steps)
    for prefill in draft.prefills:
        prefill.is_deferred = prefill.view.request_id in late_ids
    return WholeCluster(BatchBuilder(draft, config.step_time), draft.prefills)


def batch_of(
    snapshot: Snapshot,
    cost_model: CostModel = H200,
    config: PolicyConfig | None = None,
    *,
    late_ids: Sequence[str] = (),
) -> BatchPlan:
    batch = group_of(snapshot, cost_model, config or PolicyConfig(), late_ids=late_ids).batch()
    assert batch is not None
    check_plan(snapshot, IterationPlan((batch,)))
    return batch


def num_computed(batch: BatchPlan, request_id: str) -> int:
    return sum(len(block.positions) for block in batch.blocks_of(request_id))


def seconds_of(batch: BatchPlan) -> float:
    assert batch.predicted_time is not None
    return batch.predicted_time


@st.composite
def groups(draw: st.DrawFn) -> Snapshot:
    """Any mix of decodes and prompts on one to five instances, some of them full."""
    num_instances = draw(st.integers(1, 5))
    ids = st.lists(st.integers(0, num_instances - 1), min_size=1, unique=True).map(tuple)
    views: list[RequestView] = []
    for number in range(draw(st.integers(0, 6))):
        held = draw(ids)
        kind, length = draw(st.sampled_from(["decode", "begun", "wait"])), draw(st.integers(1, 20_000))
        if kind == "decode":
            view = decoding(f"d{number}", length, held, max_tokens=draw(st.integers(2, 40)))
            views.append(replace(view, first_token_time=draw(st.sampled_from([None, 0.0, 0.95]))))
        elif kind == "begun":
            views.append(begun(f"b{number}", length + 50, 50, held))
        else:
            views.append(waiting(f"w{number}", length))
    used = [0] * num_instances
    for view in views:
        for instance_id, num_tokens in view.placement.tokens_by_instance().items():
            used[instance_id] += num_tokens
    rooms = st.sampled_from([0, 1, 30, 2000, 10**6])
    return snapshot_of([held + draw(rooms) for held in used], views, now=1.0)


configs = st.builds(
    PolicyConfig,
    target_tpot=st.sampled_from([1e-3, 0.03, 0.2]),
    max_num_batched_tokens=st.sampled_from([1, 64, 8192]),
    lease_steps=st.sampled_from([1, 5, 16]),
    deferred_share=st.sampled_from([0.0, 0.05]),
)


@examples(30, thorough=600)
@given(groups(), st.sampled_from(list(MODELS.values())), configs, st.data())
def test_whatever_a_group_runs_keeps_the_rules_and_holds_up_no_decode_alone(
    snapshot: Snapshot, cost_model: CostModel, config: PolicyConfig, data: st.DataObject
) -> None:
    late_ids = [view.request_id for view in snapshot.waiting if data.draw(st.booleans())]
    group = group_of(snapshot, cost_model, config, late_ids=late_ids)
    decodes, batch = [view.request_id for view in group.decodes], group.batch()
    num_free = sum(group.builder.draft.view.free.values())
    if batch is None:
        assert num_free < len(decodes) or not decodes
        assert num_free == 0 or not group.prefills or decodes
        return
    check_plan(snapshot, IterationPlan((batch,)))
    assert set(decodes) <= set(batch.request_ids) or not set(decodes) & set(batch.request_ids)
    if set(decodes) != set(batch.request_ids):
        assert batch.num_steps == 1
        assert not group.prefills or len(batch.request_ids) > 0


def test_a_lease_has_as_many_steps_as_there_is_room_for() -> None:
    for num_free, expected in ((400, 16), (48, 16), (47, 8), (23, 4), (5, 1), (3, 1)):
        views = [decoding(f"d{n}", 100, (0,), max_tokens=99) for n in range(3)]
        assert batch_of(snapshot_of([300 + num_free], views)).num_steps == expected
    assert group_of(snapshot_of([302], views), H200, PolicyConfig()).batch() is None


def test_a_lease_has_no_more_steps_than_any_request_takes() -> None:
    views = [decoding("a", 100, (0,), max_tokens=3), decoding("b", 100, (0,), max_tokens=6)]
    assert batch_of(snapshot_of([9999], views)).num_steps == 5


def test_a_lease_fits_into_the_seconds_it_is_given() -> None:
    views = [decoding(f"d{n}", 10_000, (0,), max_tokens=99) for n in range(8)]
    snapshot = snapshot_of([99_999], views)
    batch_builder = group_of(snapshot, H200, PolicyConfig()).builder
    step = batch_builder.lease((0,), views, 10.0)
    assert step is not None
    for num_steps in (1, 3, 7):
        lease = batch_builder.lease((0,), views, num_steps * seconds_of(step) * 1.01)
        assert lease is not None
        assert lease.num_steps == num_steps
    assert batch_builder.lease((0,), views, seconds_of(step) * 0.9) is None
    assert batch_builder.lease((0,), [], 10.0) is None
    full = group_of(snapshot_of([80_000], views), H200, PolicyConfig()).builder
    assert full.lease((0,), views, 10.0) is None


def test_nothing_to_run_is_no_batch() -> None:
    assert group_of(snapshot_of([100, 100]), H200, PolicyConfig()).batch() is None


@pytest.mark.parametrize("model", [CPU, H200], ids=["cpu", "h200"])
@pytest.mark.parametrize("num_decodes", [1, 16])
def test_decodes_keep_their_pace_beside_a_prompt_of_any_length(model: CostModel, num_decodes: int) -> None:
    decodes = [decoding(f"d{n}", 500, (n % 2,)) for n in range(num_decodes)]
    config = PolicyConfig(target_tpot=0.08)
    for prompt in (waiting("p", 10**6), begun("p", 10**6, 30_000, (0, 1)), waiting("p", 300)):
        batch = batch_of(snapshot_of([10**6] * 2, [*decodes, prompt]), model, config)
        assert num_computed(batch, "p") > MIN_CHUNK_TOKENS
        assert seconds_of(batch) <= 1.05 * PLANNED_TPOT_SHARE * config.target_tpot


def test_the_tightest_target_of_all_decodes_bounds_the_step() -> None:
    decodes = [
        replace(decoding(f"d{n}", 500, (0,)), slo=SLO(1.0, tpot)) for n, tpot in enumerate((0.5, 0.02, 0.1))
    ]
    batch = batch_of(snapshot_of([10**7], [*decodes, waiting("p", 10**6)]))
    assert 0.6 * 0.02 < seconds_of(batch) <= 1.05 * PLANNED_TPOT_SHARE * 0.02


@pytest.mark.parametrize(
    ("first_token_time", "expected"),
    [(None, PLANNED_TPOT_SHARE), (0.0, MIN_TPOT_SHARE), (9.95, PLANNED_TPOT_SHARE), (9.87, 0.7)],
    ids=["unknown", "far behind", "ahead", "behind a little"],
)
def test_who_is_behind_has_shorter_steps_but_not_without_end(
    first_token_time: float | None, expected: float
) -> None:
    view = replace(decoding("d", 500, (0,), num_output=2), first_token_time=first_token_time)
    snapshot = snapshot_of([9999], [view], now=10.0)
    batch_builder = group_of(snapshot, H200, PolicyConfig(target_tpot=0.1)).builder
    assert batch_builder.budget([view]) == pytest.approx(expected * 0.1)


def test_without_decodes_a_step_has_the_time_it_is_meant_to_take() -> None:
    config = PolicyConfig(max_step_time=0.2)
    assert 0.15 < seconds_of(batch_of(snapshot_of([10**7], [waiting("p", 10**6)]), H200, config)) <= 0.21


def test_a_prompt_makes_progress_however_slow_its_decodes_are() -> None:
    decodes = [decoding(f"d{n}", 30_000, (0,)) for n in range(64)]
    snapshot = snapshot_of([10**7], [*decodes, waiting("p", 10**6)])
    seconds = seconds_of(batch_of(snapshot_of([10**7], decodes)))
    batch = batch_of(snapshot, H200, PolicyConfig(target_tpot=1.01 * seconds / PLANNED_TPOT_SHARE))
    assert num_computed(batch, "p") >= MIN_CHUNK_TOKENS


@pytest.mark.parametrize("target_tpot", [1e-3, 0.01])
def test_prompts_have_as_much_time_as_decodes_that_miss_their_target_anyway(target_tpot: float) -> None:
    decodes = [decoding(f"d{n}", 30_000, (0,)) for n in range(64)]
    snapshot = snapshot_of([10**7], [*decodes, waiting("p", 10**6)])
    seconds = seconds_of(batch_of(snapshot_of([10**7], decodes)))
    assert seconds > target_tpot
    batch = batch_of(snapshot, H200, PolicyConfig(target_tpot=target_tpot))
    assert seconds_of(batch) == pytest.approx(2 * seconds, rel=0.1)


def test_a_step_takes_prompts_in_order_until_it_is_full() -> None:
    views = [waiting(name, 2000, slo=SLO(ttft, 1.0)) for name, ttft in (("c", 3.0), ("a", 1.0), ("b", 2.0))]
    batch = batch_of(snapshot_of([10**6], views), H200, PolicyConfig(max_step_time=0.1))
    assert (num_computed(batch, "a"), num_computed(batch, "b")) == (2000, 2000)
    assert 0 < num_computed(batch, "c") < 2000


def test_short_prompts_are_each_computed_where_there_is_time() -> None:
    views = [waiting(f"p{n}", 1000) for n in range(4)]
    batch = batch_of(snapshot_of([10**6] * 4, views))
    assert sorted(block.master_id for block in batch.queries) == [0, 1, 2, 3]


def test_a_prompt_alone_on_a_group_is_striped_over_it() -> None:
    batch = batch_of(snapshot_of([10**6] * 4, [waiting("p", 4000)]))
    assert [len(block.positions) for block in batch.queries] == [1000] * 4
    assert {block.transfer for block in batch.queries} == {Transfer.KV}


def test_a_prompt_too_long_for_one_instance_is_striped_beside_decodes() -> None:
    views = [decoding("d", 500, (0,)), waiting("p", 50_000)]
    batch = batch_of(snapshot_of([10**6] * 2, views))
    assert len(batch.blocks_of("p")) == 2


def late_prompts(num_others: int, num_tokens: int) -> list[RequestView]:
    others = [waiting(f"p{n}", num_tokens, arrival_time=1.0) for n in range(num_others)]
    return [*others, waiting("late", 200_000)]


def test_one_that_was_deferred_has_its_share_of_a_full_step() -> None:
    views = late_prompts(7, 4000)
    shares = []
    for deferred_share in (0.0, 0.1, 0.5):
        config = PolicyConfig(deferred_share=deferred_share)
        batch = batch_of(snapshot_of([10**6], views, now=1.0), H200, config, late_ids=["late"])
        shares.append(num_computed(batch, "late"))
        assert num_computed(batch, "p0") > 1000
    assert shares[0] < shares[1] < shares[2]
    assert shares[0] == 0


def test_one_that_was_deferred_has_all_that_the_others_leave() -> None:
    alone = batch_of(snapshot_of([10**6], late_prompts(0, 1)), late_ids=["late"])
    assert seconds_of(alone) > 0.09
    beside = batch_of(snapshot_of([10**6], late_prompts(2, 500), now=1.0), late_ids=["late"])
    assert num_computed(beside, "p0") == num_computed(beside, "p1") == 500
    assert seconds_of(beside) > 0.09


def test_one_that_has_missed_its_target_has_its_share_whatever_is_due_before_it() -> None:
    soon = [waiting(f"p{n}", 4000, arrival_time=5.0, slo=SLO(1.0, 1.0)) for n in range(7)]
    for ttft, expected in ((3.0, True), (30.0, False)):  # at 5 s, the first is missed
        late = waiting("late", 50_000, slo=SLO(ttft, 1.0))
        batch = batch_of(snapshot_of([10**6], [*soon, late], now=5.0))
        assert bool(num_computed(batch, "late")) == expected
        assert num_computed(batch, "p0") > 2000


def test_one_that_has_missed_its_target_and_is_due_first_has_all_it_can_use() -> None:
    soon = [waiting(f"p{n}", 4000, arrival_time=5.0, slo=SLO(9.0, 1.0)) for n in range(8)]
    late = waiting("late", 50_000, slo=SLO(3.0, 1.0))
    batch = batch_of(snapshot_of([10**6], [*soon, late], now=5.0))
    assert num_computed(batch, "late") > 10 * num_computed(batch, "p0")


def test_a_step_of_prompts_is_as_long_as_reading_a_history_is_worth() -> None:
    model = replace(H200, coefficients=replace(H200.coefficients, key=5e-7))
    for num_cached, seconds in ((20_000, 0.1), (60_000, 0.24), (400_000, 0.5)):
        batch = batch_of(snapshot_of([10**7], [begun("p", 600_000, num_cached, (0,))]), model)
        assert seconds_of(batch) == pytest.approx(seconds, rel=0.05)


@pytest.mark.parametrize(("num_decodes", "num_cached"), [(40, 0), (0, 400_000)], ids=["decodes", "history"])
def test_one_that_is_late_goes_on_though_its_share_is_too_short_for_a_chunk(
    num_decodes: int, num_cached: int
) -> None:
    late = begun("late", 500_000, num_cached, (0,)) if num_cached else waiting("late", 500_000)
    decodes = [decoding(f"d{n}", 5000, (0,)) for n in range(num_decodes)]
    soon = [waiting(f"p{n}", 8000, arrival_time=1e5) for n in range(8)]
    snapshot = snapshot_of([10**7], [*decodes, *soon, late], now=1e5)  # so late that its share is owed
    for deferred_share, least in ((0.005, MIN_CHUNK_TOKENS), (0.0, 0)):
        config = PolicyConfig(target_tpot=0.02, deferred_share=deferred_share)
        batch = batch_of(snapshot, H200, config, late_ids=["late"])
        assert least <= num_computed(batch, "late") <= 25 * least
        assert sum(num_computed(batch, view.request_id) for view in soon) > 4 * MIN_CHUNK_TOKENS


def test_without_room_for_its_decodes_a_group_runs_nothing() -> None:
    views = [decoding("a", 50, (0,)), decoding("b", 50, (0,)), waiting("p", 10)]
    builder = group_of(snapshot_of([101], views), H200, PolicyConfig()).builder
    prefills = [PrefillCandidate(views[2], 10, 0, 0.01, 1.0, 1.0)]
    assert WholeCluster(builder, prefills).batch() is None
