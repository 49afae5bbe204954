from collections.abc import Iterable, Sequence
from itertools import count, pairwise

import pytest
from simulation import instances_with

from loong.core.errors import InvalidEventError
from loong.core.events import Event, RequestArrived
from loong.core.observer import Observer
from loong.core.request import Request
from loong.executor.simulated import SimulatedExecutor
from loong.scheduler.config import PolicyConfig
from loong.scheduler.cost.cost_model import WorkCostModel
from loong.scheduler.policy import make_policy
from loong.simulation.arrivals import request_of
from loong.simulation.cluster import SimulatedCluster
from loong.simulation.config import Load
from loong.simulation.run import REFUSED, SimulatedRun, simulate
from loong.workloads.metrics.metrics import compute_metrics
from loong.workloads.metrics.slo import parse_slo
from loong.workloads.request import RequestShape, TokenRun, Turn, WorkloadRequest
from loong.workloads.workload import make_workload

LIMITS = parse_slo("ttft:60000 tpot:1000").limits_of(None)
THINK_TIME = 0.5


def session(session_id: int, num_turns: int = 3, at: float = 0.0, new: int = 40) -> list[WorkloadRequest]:
    """Return turns with answers of 4 tokens."""
    turns: list[WorkloadRequest] = []
    for number in range(num_turns):
        think_time = THINK_TIME if number else 0.0
        run = TokenRun(100 * session_id + number, new)
        shape = RequestShape((run,), 4, turn=Turn(session_id, number, num_turns, think_time))
        if turns:
            shape = shape.after(turns[-1].shape, 4)
        turns.append(WorkloadRequest(at, shape))
    return turns


class Prompts(Observer):
    """Notes the requests that arrive."""

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}

    def on_event(self, event: Event, applied: object) -> None:
        if isinstance(event, RequestArrived):
            self.requests[event.request.request_id] = event.request

    def on_plan(self, *_: object) -> None:
        pass


def run(
    load: Sequence[WorkloadRequest],
    *,
    following: Iterable[WorkloadRequest] = (),
    prompts: Prompts | None = None,
) -> SimulatedRun:
    cluster = SimulatedCluster(instances_with([1000, 1000]), WorkCostModel(), max_request_tokens=1000)
    plan = make_policy("replicas", PolicyConfig())
    observers = () if prompts is None else (prompts,)
    return simulate(plan, cluster, Load(load, following), LIMITS, observers=observers)


def test_a_turn_arrives_its_think_time_after_the_answer_before_it_ended() -> None:
    records = run([*session(1), *session(2)]).records
    assert all(record.is_completed for record in records)
    for turns in (records[:3], records[3:]):
        assert turns[0].sent_time == 0.0
        for before, after in pairwise(turns):
            assert after.sent_time == after.due_time == before.finish_time + THINK_TIME


def test_a_prompt_has_the_prompt_and_the_answer_before_it_and_different_runs_differ() -> None:
    prompts = Prompts()
    run([*session(1), *session(2)], prompts=prompts)
    first, second, third, other, *_ = (list(prompts.requests[f"r{n:06}"].prompt_token_ids) for n in range(6))
    assert second[:44] == [*first, 0, 1, 2, 3]
    assert third[:88] == [*second, 0, 1, 2, 3]
    assert [len(prompt) for prompt in (first, second, third)] == [40, 84, 128]
    assert set(first).isdisjoint(other)


def test_equal_runs_are_equal_tokens() -> None:
    shapes = [RequestShape((TokenRun(5, 30), TokenRun(6, size)), 2) for size in (10, 20)]
    one, other = (request_of(n, WorkloadRequest(0.0, shape), LIMITS) for n, shape in enumerate(shapes))
    assert list(other.prompt_token_ids[:40]) == list(one.prompt_token_ids)


def test_a_load_may_end_inside_a_session() -> None:
    records = run(session(1, num_turns=5)[:2]).records
    assert [record.is_completed for record in records] == [True, True]


def test_sessions_of_one_id_that_overlap_keep_their_own_turns() -> None:
    records = run([*session(1), *session(1, new=50)]).records
    assert [len(record.token_times) for record in records] == [4] * 6
    assert [record.usage.num_prompt_tokens for record in records if record.usage] == [
        40,
        84,
        128,
        50,
        104,
        158,
    ]
    prompts = Prompts()
    run([*session(1), *session(1, new=50)], prompts=prompts)
    sizes = {name: len(request.prompt_token_ids) for name, request in prompts.requests.items()}
    assert [sizes[name] for name in sorted(sizes)] == [40, 84, 128, 50, 104, 158]


def test_turns_that_grow_beyond_what_fits_are_refused_with_all_after_them() -> None:
    records = run(session(1, num_turns=4, new=400)).records
    assert [record.error for record in records] == [None, None, REFUSED, REFUSED]


def test_sessions_that_follow_go_on_until_what_is_measured_has_ended() -> None:
    def crowd() -> Iterable[WorkloadRequest]:
        for number in count(10):
            yield from session(number, at=0.01 * number)

    result = run(session(1), following=crowd())
    assert [record.is_completed for record in result.records] == [True] * 3
    assert result.stats.num_arrived > 3


def test_a_mix_of_sessions_and_single_requests_is_simulated_to_its_end() -> None:
    load = make_workload(
        "0.3*chats+0.7*fixed(20,4)", 200, seed=1, request_rate=5.0, length_scale=1 / 16, output_scale=1 / 16
    )
    records = run(load).records
    assert {record.error for record in records} <= {None, REFUSED}
    assert sum(record.is_completed for record in records) > 150


def test_the_ideal_hits_of_a_session_are_all_but_what_is_new() -> None:
    metrics = compute_metrics(run(session(1)).records, LIMITS)
    assert metrics.num_ideal_cached_tokens == metrics.num_cached_tokens == 43 + 87
    assert metrics.ideal_hit_rate == pytest.approx(130 / 252)


def test_a_request_cannot_be_added_to_the_past() -> None:
    executor = SimulatedExecutor(WorkCostModel(), ())
    executor.pause(2.0)
    late = request_of(0, WorkloadRequest(1.0, RequestShape((TokenRun(1, 3),), 2)), LIMITS)
    with pytest.raises(InvalidEventError, match="arrives at 1 s, but is drawn when it is 2 s already"):
        executor.add_arrival(late)


def test_bounds_of_a_token_are_targets_of_a_request() -> None:
    limits = parse_slo("loongserve-10", workload="mixed").limits_of(None)
    request = request_of(0, WorkloadRequest(0.0, RequestShape((TokenRun(1, 500),), 2)), limits)
    assert request.slo is not None
    assert (request.slo.ttft, request.slo.tpot) == pytest.approx((45.0, 0.36))
