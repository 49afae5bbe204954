"""Leases whose steps do not wait for the host give the tokens of those that do, and leave the same slots."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from bare_instance import BareInstance, Outcome, Stop
from capturing_backend import CapturingBackend
from machines import H200_GRAPH_LIMITS
from plans import decode, prefill
from requests_for_tests import SCHEMA, random_prompt, sampled_request

from loong.core.events import ProducedToken
from loong.core.instructions import ReleaseKV, RunBatch, ShareKV
from loong.core.plan import BatchPlan
from loong.core.request import FinishReason
from loong.fabric.messages.socket_fabric import SocketFabric
from loong.fabric.world import World
from loong.model.tiny import tiny_model
from loong.state.live_request import LiveRequest
from loong.worker import runner
from loong.worker.batches.decode_lease import DecodeLease
from loong.worker.batches.lease_ends import LeaseTerm
from loong.worker.batches.started_batch import ReportStep

SAMPLED = ({"temperature": 0.0}, {"seed": 7}, {"seed": 3, "top_k": 5, "top_p": 0.9, "temperature": 0.7})


@pytest.fixture
def fabric(tmp_path: Path) -> Iterator[SocketFabric]:
    """Yield a fabric of one instance without peers."""
    alone = SocketFabric(tmp_path, World(1, 1), 0, deadline=1.0)
    yield alone
    alone.close()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Path:
    """Of more tokens than the model has: those that it lacks never come."""
    return tiny_model(folder.parent)


@pytest.fixture
def leases(monkeypatch: pytest.MonkeyPatch) -> list[RunBatch]:
    """Return the leases that did not wait for the host."""
    begun: list[RunBatch] = []
    finish = DecodeLease.finish

    def noting(self: DecodeLease, lease_end: LeaseTerm, report: ReportStep) -> int:
        begun.append(self.command)
        return finish(self, lease_end, report)

    monkeypatch.setattr(DecodeLease, "finish", noting)
    return begun


def command(batch_id: int, plan: BatchPlan, *lives: LiveRequest) -> RunBatch:
    return RunBatch(batch_id, plan, tuple(live.input_for(plan) for live in lives))


def run(
    fabric: SocketFabric,
    folder: Path,
    stop: Stop | None,
    num_tokens: tuple[int, ...],
    *each: Mapping[str, object],
    tokenizer: Path | None = None,
    **params: object,
) -> list[Outcome]:
    """Prefill requests, then decode them on a lease of 12 steps; both ways of taking it.

    A `stop` beyond these lets the lease go on. `each` are their parameters in addition to `params`.
    """
    outcomes = []
    for way, takes_leases in enumerate((False, True)):
        backend = CapturingBackend(H200_GRAPH_LIMITS, takes_leases=takes_leases)
        instance = BareInstance(fabric, 0, folder, stop, backend, tokenizer=tokenizer)
        lives = [
            LiveRequest(sampled_request(random_prompt(20 + n, seed=n), n, **{**own, **params}))
            for n, own in zip(num_tokens, each or SAMPLED, strict=True)
        ]
        first = prefill([live.view() for live in lives], (0,))
        begun = instance.carry_out(command(2 * way, first, *lives))
        for live, (_, token) in zip(lives, begun.tokens, strict=True):
            live.placement = live.placement.adding(first.writes_of(live.request.request_id))
            live.output_token_ids.append(token.token_id)
        masters = {live.request.request_id: 0 for live in lives}
        lease = decode([live.view() for live in lives], (0,), masters, num_steps=12)
        outcomes.append(instance.carry_out(command(2 * way + 1, lease, *lives)))
        for live in lives:
            instance.carry_out(ReleaseKV(live.request.request_id, (0,)))
    return outcomes


def reported(outcome: Outcome) -> list[tuple[int, int, FinishReason | None]]:
    def without_id(step: int, token: ProducedToken) -> tuple[int, int, FinishReason | None]:
        return step, token.token_id, token.finish_reason

    return [without_id(step, token) for step, token in outcome.tokens]


ENDS = [
    None,
    Stop(1),
    Stop(4),
    Stop(2, reported_in=5),
    Stop(20),
    Stop(17, reported_in=11),
    Stop(19, reported_in=12),
]


@pytest.mark.parametrize("stop", ENDS, ids=str)
@pytest.mark.parametrize("num_tokens", [(30, 40, 50), (4, 30, 9), (4, 6, 9)], ids=str)
def test_steps_that_do_not_wait_give_the_same_tokens_and_end_with_the_same_slots(
    fabric: SocketFabric, folder: Path, stop: Stop | None, num_tokens: tuple[int, ...]
) -> None:
    waiting, not_waiting = run(fabric, folder, stop, num_tokens)
    assert reported(not_waiting) == reported(waiting)
    assert not_waiting.num_steps == waiting.num_steps
    live = [n for n in num_tokens if n - 1 > waiting.num_steps]
    if len(live) == len(num_tokens):
        assert not_waiting.num_slots_used == waiting.num_slots_used


@pytest.mark.parametrize("stop", [None, Stop(25, reported_in=3)], ids=str)
def test_a_request_that_ends_by_a_token_leaves_and_the_others_go_on(
    fabric: SocketFabric, folder: Path, stop: Stop | None
) -> None:
    stops = tuple(range(0, 97, 9))
    waiting, not_waiting = run(fabric, folder, stop, (30, 30, 30), stop_token_ids=stops)
    assert any(token.finish_reason is FinishReason.STOP for _, token in waiting.tokens)
    assert reported(not_waiting) == reported(waiting)


KINDS: Mapping[str, Mapping[str, object]] = {
    "log-probabilities": {"num_logprobs": 3},
    "chosen alone": {"num_logprobs": 0, "temperature": 0.9},
    "presence": {"presence_penalty": 1.0},
    "frequency": {"frequency_penalty": 0.9, "temperature": 0.8},
    "repetition": {"repetition_penalty": 1.7},
    "least length": {"min_tokens": 7, "stop_token_ids": tuple(range(0, 97, 2))},
    "least length passed": {"min_tokens": 1, "stop_token_ids": (5,)},
    "bias": {"logit_bias": ((5, 9.0), (6, 9.0), (40, -100.0))},
    "allowed": {"allowed_token_ids": (3, 5, 40, 41, 96), "temperature": 2.0},
    "a bad token": {"bad_words": tuple((token_id,) for token_id in range(0, 97, 2))},
    "bad words": {
        "bad_words": ((3, 5), (5, 3), (40, 40, 40), (96, 3), (3, 3), (5,)),
        "allowed_token_ids": (3, 5, 40, 41, 96),
        "temperature": 5.0,
        "num_logprobs": 2,
    },
    "bad words in a schema": {
        "grammar": SCHEMA,
        "bad_words": ((91, 49), (48, 44), (49, 49), (50,)),
        "temperature": 3.0,
        "stop_token_ids": (2,),
    },
    "allowed in a schema": {
        "grammar": SCHEMA,
        "allowed_token_ids": (91, 93, 44, 49, 50, 2),
        "temperature": 3.0,
        "stop_token_ids": (2,),
    },
    "schema": {"grammar": SCHEMA, "temperature": 3.0, "stop_token_ids": (2,)},
    "all": {
        "num_logprobs": 5,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.3,
        "min_tokens": 6,
        "stop_token_ids": (2,),
        "logit_bias": ((5, 2.0),),
        "grammar": SCHEMA,
        "temperature": 2.0,
    },
}


# All with a lease that goes on, and those with the most state with leases that do not.
@pytest.mark.parametrize(
    ("kind", "stop"),
    [
        *((kind, Stop(17, reported_in=11)) for kind in KINDS),
        *((kind, stop) for kind in ("all", "bad words", "schema") for stop in (None, Stop(4))),
    ],
    ids=str,
)
def test_whatever_requests_ask_for_comes_without_waiting(
    fabric: SocketFabric,
    folder: Path,
    tokenizer: Path,
    leases: list[RunBatch],
    stop: Stop | None,
    kind: str,
) -> None:
    waiting, not_waiting = run(fabric, folder, stop, (30, 8, 13), tokenizer=tokenizer, **KINDS[kind])
    assert len(leases) == 1
    assert reported(not_waiting) == reported(waiting)
    assert_same_logprobs(not_waiting, waiting)


def test_requests_that_ask_for_different_things_share_a_lease(
    fabric: SocketFabric, folder: Path, tokenizer: Path, leases: list[RunBatch]
) -> None:
    each = [{"seed": i, **params} for i, params in enumerate([{}, *KINDS.values(), {"temperature": 0.0}])]
    num_tokens = tuple(range(9, 9 + 2 * len(each), 2))
    waiting, not_waiting = run(fabric, folder, None, num_tokens, *each, tokenizer=tokenizer)
    assert len(leases) == 1
    assert reported(not_waiting) == reported(waiting)
    assert_same_logprobs(not_waiting, waiting)


def test_a_request_whose_schema_nothing_can_keep_to_fails_alone(
    fabric: SocketFabric, folder: Path, leases: list[RunBatch]
) -> None:
    """A bare instance has no tokenizer."""
    begun = {"grammar": SCHEMA, "temperature": 0.0}
    waiting, not_waiting = run(fabric, folder, None, (13, 13), begun, {"seed": 1})
    assert len(leases) == 1
    assert reported(not_waiting) == reported(waiting)
    reasons = Counter(token.finish_reason for _, token in not_waiting.tokens)
    assert reasons == {FinishReason.STUCK: 1, FinishReason.LENGTH: 1, None: 11}


def assert_same_logprobs(one: Outcome, other: Outcome) -> None:
    """A lease computes padded rows, so its numbers are a little different."""
    for (_, ours), (_, theirs) in zip(one.tokens, other.tokens, strict=True):
        if ours.logprobs is None or theirs.logprobs is None:
            assert ours.logprobs == theirs.logprobs
            continue
        assert ours.logprobs.chosen == pytest.approx(theirs.logprobs.chosen, abs=1e-5)
        assert [i for i, _ in ours.logprobs.top] == [i for i, _ in theirs.logprobs.top]
        assert [x for _, x in ours.logprobs.top] == pytest.approx(
            [x for _, x in theirs.logprobs.top], abs=1e-5
        )


@pytest.mark.parametrize("takes_leases", [False, True])
def test_siblings_hold_the_slots_of_their_prompt_until_the_last_has_gone(
    fabric: SocketFabric, folder: Path, takes_leases: bool
) -> None:
    instance = BareInstance(
        fabric, 0, folder, None, CapturingBackend(H200_GRAPH_LIMITS, takes_leases=takes_leases)
    )
    request = replace(sampled_request(random_prompt(20, seed=1), 30, seed=7), num_choices=3)
    primary, *_ = choices = LiveRequest.choices_of(request)
    first = prefill([primary.view()], (0,))
    begun = instance.carry_out(command(0, first, primary))
    assert [token.request_id for _, token in begun.tokens] == [live.request.request_id for live in choices]
    assert begun.num_slots_used == 20
    placement = primary.placement.adding(first.writes)
    for live, (_, token) in zip(choices, begun.tokens, strict=True):
        live.placement = placement.of(live.request.request_id)
        live.output_token_ids.append(token.token_id)
        if live is not primary:
            instance.share(ShareKV(live.request.request_id, placement.segments))
    primary.unstarted = []
    masters = {live.request.request_id: 0 for live in choices}
    lease = decode([live.view() for live in choices], (0,), masters, num_steps=12)
    assert instance.carry_out(command(1, lease, *choices)).num_slots_used == 20 + 3 * 12
    left = [instance.carry_out(ReleaseKV(live.request.request_id, (0,))) for live in choices]
    assert [outcome.num_slots_used for outcome in left] == [20 + 2 * 12, 20 + 12, 0]


def test_a_lease_whose_lists_of_slots_are_too_long_waits_for_the_host(
    fabric: SocketFabric, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared slots are in the list of each request that has them: there can be more than there are slots."""
    monkeypatch.setattr(runner, "MAX_SERVED_LISTS", 0)
    monkeypatch.setattr(DecodeLease, "_take_steps", None)  # it is not called
    waiting, not_waiting = run(fabric, folder, None, (30, 40, 50))
    assert reported(not_waiting) == reported(waiting)
