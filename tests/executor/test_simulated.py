import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from plans import decode, prefill
from simulation import instances_with, simulate, timed_request
from snapshots import waiting

from loong.core.cost.work import InstanceWork, step_work
from loong.core.errors import InvalidEventError
from loong.core.events import (
    BatchEndPredicted,
    BatchFinished,
    BatchStarted,
    Event,
    InstanceJoined,
    InstanceLost,
    MigrationFinished,
    RequestAborted,
    RequestArrived,
    TokensProduced,
)
from loong.core.instructions import StopLease
from loong.core.placement import KVSegment, Placement
from loong.core.plan import BatchPlan, IterationPlan, KVMigration, LeaseExtension
from loong.core.request import FinishReason, Request
from loong.executor.lookahead import SENDING_SHARE, LookaheadMargin
from loong.executor.processors import Processors
from loong.executor.simulated import SimulatedExecutor
from loong.executor.simulated_steps import HIDDEN_SHARE
from loong.scheduler.cost.cost_model import ServiceLane, WorkCostModel
from loong.state.cluster_state import ClusterState

MODEL = WorkCostModel()


class Stage:
    """An executor and the state that instructs it; every event is applied at once."""

    def __init__(
        self,
        requests: Iterable[Request],
        incidents: Iterable[Event] = (),
        processors: Processors | None = None,
        plan_time: float = 0.0,
        lookahead: LookaheadMargin | None = None,
        model: WorkCostModel = MODEL,
        capacities: Sequence[int] = (1000, 1000),
    ) -> None:
        self.state = ClusterState(instances_with(capacities))
        self._events: deque[Event] = deque()
        self.starts: list[BatchStarted] = []
        self.executor = SimulatedExecutor(
            model, requests, incidents, processors=processors, plan_time=plan_time, lookahead=lookahead
        )

    def next_event(self) -> Event | None:
        """None once the executor has drained. Starts of batches go to `starts`."""
        while True:
            if not self._events:
                self._events.extend(asyncio.run(self.executor.next_events()))
            if not self._events:
                return None
            event = self._events.popleft()
            self.executor.submit(self.state.apply(event).instructions)
            if not isinstance(event, BatchStarted):
                return event
            self.starts.append(event)

    def rest(self) -> list[Event]:
        events = []
        while event := self.next_event():
            events.append(event)
        return events

    def commit(self, plan: IterationPlan) -> None:
        self.executor.submit(self.state.commit(plan, self.state.snapshot(self.executor.now)))

    def run(self, batch: BatchPlan) -> None:
        self.commit(IterationPlan(batches=(batch,)))

    def prefilled(self, num_requests: int = 1) -> "Stage":
        """Return the stage after the arrival and the prefill of `num_requests` requests, on instance 0."""
        for _ in range(num_requests):
            self.next_event()
        self.run(prefill(self.state.snapshot(0).waiting, (0,)))
        while not isinstance(self.next_event(), BatchFinished):
            pass
        return self

    def lease(self, num_steps: int) -> None:
        views = self.state.snapshot(0).running
        self.run(decode(views, (0,), {view.request_id: 0 for view in views}, num_steps=num_steps))


def test_requests_arrive_at_their_times_and_then_it_is_over() -> None:
    stage = Stage([timed_request(0, 3, 2, 0.5), timed_request(1, 3, 2, 2.0)])
    assert [event.time for event in stage.rest()] == [0.5, 2.0]
    assert stage.executor.now == 2.0
    assert stage.next_event() is None


def test_arrivals_are_drawn_one_ahead_so_they_need_not_end() -> None:
    stage = Stage(timed_request(number, 3, 2, float(number)) for number in range(10**9))
    assert [stage.next_event() for _ in range(3)][-1] == RequestArrived(2.0, timed_request(2, 3, 2, 2.0))


def test_a_prefill_takes_its_predicted_time_and_samples_once_it_is_whole() -> None:
    stage = Stage([timed_request(0, 100, 5)])
    stage.next_event()
    view = stage.state.snapshot(0).waiting[0]
    stage.run(prefill((view,), (0, 1), num_tokens=60))
    batch = stage.state.snapshot(0).batches[0]
    part, finished = stage.rest()
    assert isinstance(part, TokensProduced)
    assert part.tokens == ()
    assert finished == BatchFinished(part.time, 1, 1)
    assert part.time == MODEL.step_time(step_work(batch.plan, {"r000": Placement()}))
    stage.run(prefill(stage.state.snapshot(0).running, (0, 1)))
    last = stage.next_event()
    assert isinstance(last, TokensProduced)
    assert [token.token_id for token in last.tokens] == [0]


def test_a_lease_reports_every_step_and_ends_with_its_requests() -> None:
    stage = Stage([timed_request(0, 10, 3), timed_request(1, 10, 5)]).prefilled(2)
    stage.lease(16)
    events = stage.rest()
    steps = [event for event in events if isinstance(event, TokensProduced)]
    assert [event.step for event in steps] == [0, 1, 2, 3]
    assert [[token.request_id for token in event.tokens] for event in steps] == [
        ["r000", "r001"],
        ["r000", "r001"],
        ["r001"],
        ["r001"],
    ]
    assert steps[1].tokens[0].finish_reason is FinishReason.LENGTH
    assert events[-1] == BatchFinished(steps[-1].time, 2, 4)
    assert not stage.state.snapshot(0).request


def test_a_stopped_lease_ends_before_the_step_named() -> None:
    stage = Stage([timed_request(0, 10, 100)]).prefilled()
    stage.lease(16)
    stage.next_event()
    batch = stage.state.snapshot(0).batches[0]
    stage.executor.submit([StopLease(batch.batch_id, batch.plan.group, 3)])
    assert [event.step for event in stage.rest() if isinstance(event, TokensProduced)] == [1, 2]


def test_a_lease_stopped_too_late_ends_at_the_next_boundary() -> None:
    stage = Stage([timed_request(0, 10, 100)]).prefilled()
    stage.lease(16)
    for _ in range(4):
        stage.next_event()
    batch = stage.state.snapshot(0).batches[0]
    stage.executor.submit([StopLease(batch.batch_id, batch.plan.group, 2)])
    assert [event.step for event in stage.rest() if isinstance(event, TokensProduced)] == [4]


def test_a_lease_goes_on_if_it_hears_of_it_in_time() -> None:
    stage = Stage([timed_request(0, 10, 100)]).prefilled()
    stage.lease(4)
    stage.next_event()
    stage.commit(IterationPlan(lease_extensions=(LeaseExtension(2, 7),)))
    assert [event.step for event in stage.rest() if isinstance(event, TokensProduced)] == [1, 2, 3, 4, 5, 6]


def test_a_lease_that_hears_too_late_that_it_may_go_on_ends() -> None:
    stage = Stage([timed_request(0, 10, 100)], plan_time=10.0).prefilled()
    stage.lease(4)
    stage.next_event()
    stage.commit(IterationPlan(lease_extensions=(LeaseExtension(2, 7),)))
    assert [event.step for event in stage.rest() if isinstance(event, TokensProduced)] == [1, 2, 3]
    assert stage.state.snapshot(0).instances[0].kv_used == 10 + 4


def test_a_migration_takes_its_predicted_time() -> None:
    stage = Stage([timed_request(0, 10, 100)]).prefilled()
    before = stage.executor.now
    stage.commit(IterationPlan(migrations=(KVMigration(KVSegment("r000", range(0, 10, 2), 0), 1),)))
    assert stage.rest() == [MigrationFinished(before + MODEL.migration_time(5, 0, 1), 2, is_committed=True)]
    assert stage.state.snapshot(0).running[0].placement.instance_ids == (0, 1)


def test_a_lease_is_slower_by_as_much_as_kv_that_moves_meanwhile_takes_of_its_instance() -> None:
    ends = []
    model = WorkCostModel(replace(MODEL.coefficients, kept_key=1e-7))
    for num_moved in (0, 5):
        stage = Stage([timed_request(n, 10, 100) for n in range(2)], model=model).prefilled(2)
        first, other = stage.state.snapshot(0).running
        stage.run(decode((first,), (0,), {first.request_id: 0}, num_steps=50))
        if num_moved:
            segment = KVSegment(other.request_id, range(num_moved), 0)
            stage.commit(IterationPlan(migrations=(KVMigration(segment, 1),)))
        ends.append(max(event.time for event in stage.rest() if isinstance(event, TokensProduced)))
    assert ends[1] - ends[0] == pytest.approx(model.copying_time(5), rel=1e-3)


def test_an_abort_is_reported_at_its_time() -> None:
    stage = Stage([timed_request(0, 10, 100)], [RequestAborted(0.7, "r000")])
    assert [event.time for event in stage.rest()] == [0.0, 0.7]
    assert not stage.state.snapshot(0).request


def test_two_runs_are_the_same() -> None:
    requests = [timed_request(n, 5 + 37 * n % 200, 1 + n % 9, n * 2e-3) for n in range(20)]
    first, second = (simulate("esp", [2000] * 3, requests) for _ in range(2))
    assert first == second


def test_a_lease_takes_longer_as_its_kv_grows() -> None:
    stage = Stage([timed_request(0, 10, 100)]).prefilled()
    stage.lease(50)
    times = [event.time for event in stage.rest() if isinstance(event, TokensProduced)]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert gaps == sorted(gaps)
    assert gaps[-1] - gaps[0] == pytest.approx(48 * MODEL.coefficients.decode_key)


def test_planning_delays_what_it_starts() -> None:
    first_tokens = []
    for plan_time in (0.0, 0.25):
        stage = Stage([timed_request(0, 10, 1)], plan_time=plan_time)
        stage.next_event()
        stage.run(prefill(stage.state.snapshot(0).waiting, (0,)))
        first_tokens.append(stage.rest()[0].time)
    assert first_tokens[1] == first_tokens[0] + 0.25


def test_two_batches_on_one_core_take_as_long_as_both() -> None:
    stage = Stage([timed_request(n, 100, 1) for n in range(2)], processors=Processors(num_cores=1))
    first, second = stage.next_event(), stage.next_event()
    assert first.__class__ is second.__class__ is RequestArrived
    for instance_id, view in enumerate(stage.state.snapshot(0).waiting):
        stage.run(prefill((view,), (instance_id,)))
    alone = MODEL.step_time(step_work(stage.state.snapshot(0).batches[0].plan, {"r000": Placement()}))
    assert [e.time for e in stage.rest() if isinstance(e, TokensProduced)] == [2 * alone] * 2


def test_a_lost_instance_ends_what_it_took_part_in_without_another_word() -> None:
    requests = [timed_request(n, 10, 100) for n in range(2)]
    stage = Stage(requests, [InstanceLost(0.01, 0)]).prefilled(2)
    kept, moved = stage.state.snapshot(0).running
    segment = KVSegment(moved.request_id, range(5), 0)
    stage.run(decode((kept,), (0,), {kept.request_id: 0}, num_steps=50))
    stage.commit(IterationPlan(migrations=(KVMigration(segment, 1),)))
    events = stage.rest()
    assert events[-1] == InstanceLost(0.01, 0, void_batch_ids=(2,))
    snapshot = stage.state.snapshot(0)
    assert [view.request_id for view in snapshot.waiting] == [kept.request_id]
    assert [view.missing for view in snapshot.running] == [(range(5, 11),)]  # the copy was there before


@pytest.mark.parametrize("lost_id", [0, 1])
def test_a_batch_that_was_to_start_on_a_lost_instance_never_does(lost_id: int) -> None:
    """Not even if an instance of that id is back by then."""
    joined = InstanceJoined(0.02, instances_with([1000, 1000])[lost_id])
    requests = [timed_request(n, 10, 1) for n in range(2)]
    stage = Stage(requests, [InstanceLost(0.01, lost_id), joined], plan_time=0.05)
    for _ in requests:
        stage.next_event()
    waiting = stage.state.snapshot(0).waiting
    stage.commit(IterationPlan(tuple(prefill((view,), (i,)) for i, view in enumerate(waiting))))
    reported = [event for event in stage.rest() if isinstance(event, TokensProduced)]
    assert [token.request_id for event in reported for token in event.tokens] == [f"r00{1 - lost_id}"]


@pytest.mark.parametrize("lost_id", [0, 1])
def test_a_migration_that_was_to_start_at_a_lost_instance_never_does(lost_id: int) -> None:
    stage = Stage([timed_request(0, 10, 100)], [InstanceLost(0.8, lost_id)], plan_time=0.5).prefilled()
    assert stage.executor.now < 0.8
    stage.commit(IterationPlan(migrations=(KVMigration(KVSegment("r000", range(5), 0), 1),)))
    assert stage.rest() == [InstanceLost(0.8, lost_id)]


def test_an_arrival_before_the_one_ahead_of_it_is_refused_with_both_times() -> None:
    stage = Stage([timed_request(0, 3, 2, 2.0), timed_request(1, 3, 2, 0.5)])
    with pytest.raises(InvalidEventError, match=r"r001 arrives at 0\.5 s, .* 2 s"):
        stage.rest()


def test_the_first_batch_after_a_rest_takes_longer() -> None:
    seldom = [timed_request(number, 10, 3, time) for number, time in enumerate((1.0, 3.0))]
    dear = WorkCostModel(replace(MODEL.coefficients, idle_start=0.5))
    quick, slow = (simulate("tp", [1000], seldom, cost_model=model) for model in (MODEL, dear))
    for request in seldom:
        assert slow.ttft(request) == pytest.approx(quick.ttft(request) + 0.5)
        first, *_, last = slow.token_times[request.request_id]
        assert last - first < 0.1, "the batches that follow at once do not rest"


def test_time_passes_only_while_nothing_is_due() -> None:
    executor = SimulatedExecutor(MODEL, [timed_request(0, 10, 1, 2.0)])
    executor.pause(1.5)
    assert executor.now == 1.5
    with pytest.raises(InvalidEventError, match="are to pass"):
        executor.pause(1.0)


MARGIN = LookaheadMargin(batch=1e-3, request=0.0)


def predicted(stage: Stage, model: WorkCostModel = MODEL) -> tuple[float, float]:
    """Let a prompt run until its end is predicted; returns when it was, and when the end is to come."""
    stage.next_event()
    plan = prefill(stage.state.snapshot(0).waiting, (0,))
    seconds = model.step_time(step_work(plan, {"r000": Placement()}))
    stage.run(replace(plan, predicted_time=seconds))
    event = stage.next_event()
    assert isinstance(event, BatchEndPredicted)
    return event.time, event.ends_at


def test_an_end_is_predicted_by_the_margin_before_it_is_predicted() -> None:
    time, ends_at = predicted(stage := Stage([timed_request(0, 100, 9)], lookahead=MARGIN))
    assert time == pytest.approx(ends_at - MARGIN.batch)
    produced, finished = stage.rest()
    assert produced.time == finished.time == pytest.approx(ends_at)


@pytest.mark.parametrize("plan_time", [0.0, 0.4e-3, 2e-3])
def test_a_batch_begins_at_the_end_that_it_was_planned_for_however_long_plans_take(plan_time: float) -> None:
    stage = Stage([timed_request(0, 100, 9)], plan_time=plan_time, lookahead=MARGIN)
    time, ends_at = predicted(stage)
    assert ends_at - time == pytest.approx(max(MARGIN.batch, plan_time + SENDING_SHARE * MARGIN.batch))
    view = stage.state.snapshot(0).request["r000"]
    stage.run(decode([view], (0,), {"r000": 0}))
    stage.rest()
    assert [start.time for start in stage.starts[1:]] == [pytest.approx(ends_at)]


def test_what_is_reported_before_an_end_begins_with_it() -> None:
    model = WorkCostModel(replace(MODEL.coefficients, batch=MARGIN.batch))
    stage = Stage([timed_request(0, 100, 9)], lookahead=MARGIN, model=model)
    _, ends_at = predicted(stage, model)
    view = stage.state.snapshot(0).request["r000"]
    stage.run(plan := decode([view], (0, 1), {"r000": 0}))
    first = step_work(plan, {"r000": view.placement})
    seconds = model.step_time(first)
    hidden = HIDDEN_SHARE * (seconds - model.step_time(replace(first, is_first=False)))
    assert hidden > 0
    *_, produced, finished = stage.rest()
    assert isinstance(produced, TokensProduced)
    assert [token.token_id for token in produced.tokens] == [1]
    assert finished.time == pytest.approx(ends_at + seconds - hidden)
    assert [(start.batch_id, start.time) for start in stage.starts] == [(1, 0.0), (2, pytest.approx(ends_at))]


def test_kv_of_a_request_moves_when_its_batch_has_ended() -> None:
    stage = Stage([timed_request(0, 100, 9)], lookahead=MARGIN)
    _, ends_at = predicted(stage)
    segment = KVSegment("r000", range(100), 0)
    stage.commit(IterationPlan(migrations=(KVMigration(segment, 1),)))
    *_, moved = stage.rest()
    assert isinstance(moved, MigrationFinished)
    assert moved.time == pytest.approx(ends_at + MODEL.migration_time(100, 0, 1))


@pytest.mark.parametrize("lost_id", [0, 1])
@pytest.mark.parametrize("kind", ["begin", "held", "move"])
def test_what_was_reported_behind_a_batch_and_needs_an_instance_that_is_lost_is_never_done(
    lost_id: int, kind: str
) -> None:
    seconds = MODEL.step_time(step_work(prefill([waiting("r000", 100)], (0,)), {"r000": Placement()}))
    lost = InstanceLost(seconds - MARGIN.batch / 2, lost_id)
    stage = Stage([timed_request(0, 100, 9)], [lost], lookahead=MARGIN)
    predicted(stage)
    view = stage.state.snapshot(0).request["r000"]
    if kind == "move":
        stage.commit(IterationPlan(migrations=(KVMigration(KVSegment("r000", range(100), 0), 1),)))
    else:
        stage.run(decode([view], (0, 1), {"r000": 0 if kind == "begin" else 1}))
    kinds = [type(event) for event in stage.rest()]
    assert kinds == [InstanceLost, *([TokensProduced, BatchFinished] if lost_id else [])]
    snapshot = stage.state.snapshot(9.0)
    assert (snapshot.batches, snapshot.ending, snapshot.migrations) == ((), (), ())
    stage.state.check()


def test_a_batch_on_a_holder_ends_later_by_what_it_serves_meanwhile_and_by_no_more() -> None:
    model = replace(MODEL, lane=ServiceLane(delay=0.002))
    stage = Stage([timed_request(0, 100, 9), timed_request(1, 600, 2)], model=model).prefilled(1)
    while len(stage.state.snapshot(0).request) < 2:
        stage.next_event()
    (old,), (new,) = stage.state.snapshot(0).running, stage.state.snapshot(0).waiting
    alone = model.step_time(step_work(prefill((new,), (0,)), {"r001": Placement()}))
    began = stage.executor.now
    lease = decode((old,), (1,), {"r000": 1}, num_steps=8)
    stage.commit(IterationPlan(batches=(prefill((new,), (0,)), lease)))
    lease_id = next(b.batch_id for b in stage.state.snapshot(0).batches if b.plan.num_steps == 8)
    starts, chunk_end = [began], 0.0
    while (event := stage.next_event()) is not None:
        if isinstance(event, TokensProduced) and event.batch_id == lease_id:
            starts.append(event.time)
        elif isinstance(event, TokensProduced):
            chunk_end = event.time
    num_served = sum(start < chunk_end for start in starts[:-1])
    assert num_served > 2
    lost = model.served_time(InstanceWork(num_decode_keys=100))
    assert chunk_end - began == pytest.approx(alone + num_served * lost)


def test_a_group_waits_for_the_member_that_serves_longest() -> None:
    stage = Stage([timed_request(0, 100, 9), timed_request(1, 700, 2)], capacities=(1000, 1000, 1000))
    for _ in range(2):
        stage.next_event()
    first, second = stage.state.snapshot(0).waiting
    stage.run(prefill((first,), (0, 1)))
    while not isinstance(stage.next_event(), BatchFinished):
        pass
    (old,) = stage.state.snapshot(0).running
    alone = MODEL.step_time(step_work(prefill((second,), (0, 1)), {"r001": Placement()}))
    began = stage.executor.now
    lease = decode((old,), (2,), {"r000": 2})
    stage.commit(IterationPlan(batches=(prefill((second,), (0, 1)), lease)))
    ends = {e.batch_id: e.time for e in stage.rest() if isinstance(e, BatchFinished)}
    work = InstanceWork(num_decode_keys=50)
    assert max(ends.values()) - began == pytest.approx(alone + MODEL.served_time(work))
