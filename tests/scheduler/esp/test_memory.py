"""Memory instances under `esp`: what they have room for, and the KV that moves there."""

from collections import Counter

import pytest
from simulation import simulate, timed_request

from loong.core.request import Request, SamplingParams
from loong.scheduler.common import moving_kv

DOCUMENT, PIECE = tuple(range(1500)), 32


def question(number: int, num_own: int, arrival_time: float, num_output: int = 200) -> Request:
    prompt = (*DOCUMENT, *range(2000 * number, 2000 * number + num_own))
    params = SamplingParams(max_tokens=num_output)
    return Request(f"r{number}", prompt, params, arrival_time=arrival_time)


def test_a_request_may_need_more_kv_than_instances_with_weights_have() -> None:
    run = simulate("esp", [400], [timed_request(i, 600, 90) for i in range(3)], memory=[200, 150])
    assert run.stats.num_failed == run.stats.num_preemptions == 0
    assert run.stats.num_migrated_tokens > 0


def test_kv_that_requests_share_stays_and_only_their_own_moves() -> None:
    """They need 3,460 tokens of room, of which 1,500 are shared; then comes one that needs all room alone."""
    requests = [question(0, 1, 0.0, 1), *(question(1 + i, 40, 5.0) for i in range(8))]
    longest = Request("last", tuple(range(9000, 13500)), SamplingParams(max_tokens=16), arrival_time=60.0)
    run = simulate("esp", [3000], [*requests, longest], memory=[2250], keeps_prefixes=True)
    own = [m for _, plan in run.plans for m in plan.migrations if m.segment.owner_id != "last"]
    assert 0 < sum(len(m.segment.positions) for m in own) <= 8 * 240
    assert run.stats.num_preemptions == run.stats.num_failed == 0


def test_a_request_at_rest_waits_for_no_more_than_a_piece_of_its_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving_kv, "LEAST_PIECE", PIECE)
    monkeypatch.setattr(moving_kv, "PIECE_SECONDS", 0.0)
    run = simulate("esp", [400], [timed_request(i, 300, 90) for i in range(3)], memory=[400, 350])
    most = 0
    for snapshot, plan in run.plans:
        at_rest = Counter[str]()
        for segment in (migration.segment for migration in plan.migrations):
            if snapshot.request[segment.owner_id].batch_id is None:
                at_rest[segment.owner_id] += len(segment.positions)
        most = max(most, *at_rest.values(), 0)
    assert 0 < most <= PIECE
    assert run.stats.num_failed == run.stats.num_preemptions == 0
