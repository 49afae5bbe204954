"""Batches submitted before the tokens they depend on are known give the same tokens as later ones."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import pytest
from bare_instance import BareInstance, Outcome
from bare_worlds import run_commands
from capturing_backend import CapturingBackend
from machines import H200_GRAPH_LIMITS
from plans import both, decode, prefill
from requests_for_tests import random_prompt, sampled_request
from torch import Tensor

from loong.core.errors import InvalidPlanError
from loong.core.events import ProducedToken
from loong.core.instructions import ReleaseKV, RunBatch
from loong.core.placement import InstanceId
from loong.core.plan import BatchPlan, Transfer
from loong.core.request import FinishReason, RequestId
from loong.fabric.messages.socket_fabric import SocketFabric
from loong.fabric.world import World
from loong.messages.wire import BatchBegun, BatchDone, BatchFailed, ForgetFailures, PromptScored, StepDone
from loong.model.device import CpuDevice
from loong.state.live_request import LiveRequest
from loong.worker.backend import CpuBackend, Reading
from loong.worker.batch_loop import BatchLoop
from loong.worker.batches.lease_ends import LeaseEnds

MAX_TOKENS = 12
CHUNK = 10
Tokens = Mapping[RequestId, Sequence[ProducedToken]]

PLAIN: Sequence[Mapping[str, object]] = (
    {"temperature": 0.0, "num_logprobs": 2},
    {"seed": 7, "num_logprobs": 0},
    {"seed": 3, "top_k": 5, "top_p": 0.9, "temperature": 0.7},
    {"temperature": 0.0, "logit_bias": ((5, 9.0), (6, 9.0), (40, -100.0))},
    {"seed": 4, "min_tokens": 4, "stop_token_ids": (90, 91), "num_logprobs": 1},
    {"seed": 6, "allowed_token_ids": (5, 6, 7, 40), "bad_words": ((5,),)},
)
PENALIZED: Sequence[Mapping[str, object]] = (
    *PLAIN,
    {"temperature": 0.0, "presence_penalty": 1.0, "num_logprobs": 0},
    {"seed": 5, "frequency_penalty": 0.9, "repetition_penalty": 1.7, "temperature": 0.8},
    {"seed": 8, "allowed_token_ids": (5, 6, 7), "bad_words": ((5, 6), (6, 6), (7, 5, 5))},
)


@pytest.fixture
def fabric(tmp_path: Path) -> Iterator[SocketFabric]:
    """Yield a fabric of one instance without peers."""
    alone = SocketFabric(tmp_path, World(1, 1), 0, deadline=1.0)
    yield alone
    alone.close()


class LaunchingDevice(CpuDevice):
    """A device for which launching takes long, so that the host does something else meanwhile."""

    def __init__(self) -> None:
        self.meanwhile: Callable[[], None] | None = None
        self.is_launching = False

    @contextmanager
    def calling(self, meanwhile: Callable[[], None]) -> Iterator[None]:
        self.meanwhile = meanwhile
        yield
        self.meanwhile = None

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.meanwhile is not None:
            self.is_launching = True
            self.meanwhile()
            self.is_launching = False
        return super().linear(x, weight, bias)


class LateReading:
    def __init__(self, reading: Reading, is_done: Callable[[], bool]) -> None:
        self._reading, self.is_done = reading, is_done

    def wait(self) -> Sequence[Tensor]:
        return self._reading.wait()


class LateBackend(CapturingBackend):
    """A device that is never done while there is something to begin, unless its host launches that slowly.

    `story` is what happened, in order.
    """

    def __init__(self, *, takes_leases: bool, launches_slowly: bool = False) -> None:
        super().__init__(H200_GRAPH_LIMITS, takes_leases=takes_leases)
        self._launching = LaunchingDevice()
        if launches_slowly:
            self.device = self._launching
        self.reported: SimpleQueue[RunBatch | ForgetFailures | None] = SimpleQueue()
        self.story: list[int | None] = []  # a batch that was reported as done, or None: a step was launched

    def read(self, *tensors: Tensor) -> Reading:
        self.story.append(None)
        return LateReading(
            super().read(*tensors), lambda: self._launching.is_launching or self.reported.empty()
        )


class OverlappingInstance(BareInstance):
    """Begins each batch that it can before it finishes the one before."""

    def __init__(self, fabric: SocketFabric, folder: Path, backend: LateBackend) -> None:
        super().__init__(fabric, 0, folder, None, backend)
        self._backend = backend
        self._reports = list[BatchBegun | StepDone | PromptScored | BatchDone | BatchFailed]()

    def carry_out_all(self, commands: Sequence[RunBatch]) -> list[list[ProducedToken]]:
        """Return the tokens of each batch."""
        loop = BatchLoop(0, 0, self._runner, LeaseEnds(1.0), self._send, lambda: None)
        for command in commands:
            self._backend.reported.put(command)
        while commands[-1].batch_id not in self._backend.story:
            loop.turn(self._backend.reported)
        return [
            [
                token
                for report in self._reports
                if report.batch_id == command.batch_id and isinstance(report, StepDone)
                for token in report.tokens
            ]
            for command in commands
        ]

    def _send(self, *reports: BatchBegun | StepDone | PromptScored | BatchDone | BatchFailed) -> None:
        self._reports += reports
        if isinstance(reports[-1], BatchDone):
            self._backend.story.append(reports[-1].batch_id)

    @property
    def num_slots_used(self) -> int:
        return self._pool.num_used


class Chain:
    """Batches one after the other, sent when all earlier tokens are `known`, or with the last `predicted`.

    `tokens` are all that each request gets.
    """

    def __init__(self, lives: Sequence[LiveRequest], tokens: Tokens) -> None:
        self.lives, self._tokens = lives, tokens
        self.known: list[RunBatch] = []
        self.predicted: list[RunBatch] = []
        self._masters: dict[RequestId, InstanceId] = {}
        self._unknown: set[RequestId] = set()  # got a token in the batch before

    def report(
        self,
        group: Sequence[InstanceId],
        num_present: int | None = None,
        num_steps: int = 1,
        keep_on: Sequence[InstanceId] | None = None,
    ) -> None:
        """A chunk of the first prompts, and decodes behind them; KV may be kept by some without a message."""
        lives = self.lives[:num_present]
        views = [live.view() for live in lives]
        decodes = [view for view in views if view.is_decoding]
        prompts = [view for view in views if not view.is_decoding]
        plan = decode(decodes, group, self._masters, num_steps=num_steps)
        if prompts:
            transfer = Transfer.QUERY if keep_on is None else Transfer.KV
            chunks = prefill(prompts, group, num_tokens=CHUNK, keep_on=keep_on, transfer=transfer)
            plan = both(chunks, plan)
        self._report(plan, lives)

    def _report(self, plan: BatchPlan, lives: Sequence[LiveRequest]) -> None:
        batch_id = 1 + len(self.known)
        known = [live.input_for(plan) for live in lives]
        predicted = [
            given._replace(
                token_ids=given.token_ids[:-1],
                output_token_ids=given.output_token_ids[:-1],
                depends_on_batch_id=batch_id - 1,
            )
            if given.request_id in self._unknown
            else given
            for given in known
        ]
        self.known.append(RunBatch(batch_id, plan, tuple(known)))
        self.predicted.append(RunBatch(batch_id, plan, tuple(predicted)))
        self._unknown = set()
        for live, given in zip(lives, known, strict=True):
            request_id, num_known = live.request.request_id, len(live.output_token_ids)
            live.placement = live.placement.adding(plan.writes_of(request_id))
            if given.sampling_params is None:
                continue
            blocks = plan.blocks_of(request_id)
            self._masters[request_id] = max(blocks, key=lambda block: block.positions[-1]).master_id
            new = self._tokens[request_id][num_known : num_known + plan.num_steps]
            live.output_token_ids += [token.token_id for token in new]
            if plan.num_steps == 1:
                self._unknown.add(request_id)


def live_requests(*params: Mapping[str, object]) -> list[LiveRequest]:
    """One prompt is as long as three chunks."""
    lengths = (9, 30, 7, 10, 1, 8, 10, 3)
    return [
        LiveRequest(sampled_request(random_prompt(n, seed=n), MAX_TOKENS, **own))
        for n, own in zip(lengths, params, strict=False)
    ]


def all_tokens(instance: BareInstance, lives: Sequence[LiveRequest]) -> Tokens:
    """Return the tokens of requests that are computed at once, and decoded by a lease."""
    lives = [LiveRequest(live.request) for live in lives]
    plan = prefill([live.view() for live in lives], (0,))
    reported = instance.carry_out(RunBatch(1, plan, tuple(live.input_for(plan) for live in lives))).tokens
    for live, (_, token) in zip(lives, reported, strict=True):
        live.placement = live.placement.adding(plan.writes_of(live.request.request_id))
        live.output_token_ids.append(token.token_id)
    masters = {live.request.request_id: 0 for live in lives}
    plan = decode([live.view() for live in lives], (0,), masters, num_steps=MAX_TOKENS - 1)
    lease = RunBatch(2, plan, tuple(live.input_for(plan) for live in lives))
    reported += instance.carry_out(lease).tokens
    for live in lives:
        instance.carry_out(ReleaseKV(live.request.request_id, (0,)))
    return {
        live.request.request_id: [
            token for _, token in reported if token.request_id == live.request.request_id
        ]
        for live in lives
    }


def all_ways_of_going_on(lives: Sequence[LiveRequest], tokens: Tokens) -> Chain:
    """Return chunks of prompts alone and with decodes, decodes alone, and leases."""
    chain = Chain(lives, tokens)
    chain.report((0,), num_present=3)
    for _ in range(4):
        chain.report((0,))
    chain.report((0,), num_steps=3)
    chain.report((0,))
    chain.report((0,))
    return chain


def assert_same(one: Sequence[Sequence[ProducedToken]], other: Sequence[Sequence[ProducedToken]]) -> None:
    for ours, theirs in zip(one, other, strict=True):
        assert [token[:3] for token in ours] == [token[:3] for token in theirs]
        for our, their in zip(ours, theirs, strict=True):
            assert (our.logprobs is None) == (their.logprobs is None)
            if our.logprobs is not None and their.logprobs is not None:
                assert our.logprobs.chosen == pytest.approx(their.logprobs.chosen, abs=1e-5)
                assert [i for i, _ in our.logprobs.top] == [i for i, _ in their.logprobs.top]


def by_batch(outcomes: Sequence[Outcome]) -> list[list[ProducedToken]]:
    return [[token for _, token in outcome.tokens] for outcome in outcomes]


@pytest.mark.parametrize("takes_leases", [False, True])
def test_batches_reported_before_tokens_are_known_give_the_same_tokens(
    fabric: SocketFabric, folder: Path, takes_leases: bool
) -> None:
    instance = BareInstance(
        fabric, 0, folder, None, CapturingBackend(H200_GRAPH_LIMITS, takes_leases=takes_leases)
    )
    lives = live_requests(*PENALIZED)
    chain = all_ways_of_going_on(lives, all_tokens(instance, lives))
    assert any(given.depends_on_batch_id is not None for batch in chain.predicted for given in batch.inputs)
    reported = []
    for number, commands in enumerate((chain.known, chain.predicted)):
        reported.append([instance.carry_out(later(command, 10 + 10 * number)) for command in commands])
        for live in lives:
            instance.carry_out(ReleaseKV(live.request.request_id, (0,)))
    known, predicted = reported
    assert_same(by_batch(predicted), by_batch(known))
    assert [o.num_slots_used for o in predicted] == [o.num_slots_used for o in known]


def later(command: RunBatch, difference: int) -> RunBatch:
    """Return the same under a later id."""
    inputs = tuple(
        given
        if given.depends_on_batch_id is None
        else given._replace(depends_on_batch_id=given.depends_on_batch_id + difference)
        for given in command.inputs
    )
    return RunBatch(command.batch_id + difference, command.plan, inputs)


@pytest.mark.parametrize("takes_leases", [False, True])
def test_so_they_do_on_groups(fabric: SocketFabric, folder: Path, takes_leases: bool) -> None:
    lives = live_requests(*PENALIZED)
    chain = Chain(lives, all_tokens(BareInstance(fabric, 0, folder, None, CpuBackend()), lives))
    chain.report((0, 1), num_present=3)
    chain.report((1, 0))
    chain.report((0, 1))
    chain.report((0, 1))
    chain.report((0, 1))
    chain.report((1, 0), num_steps=3)
    chain.report((0, 1))
    known, predicted = (
        run_commands(folder, 2, commands, takes_leases=takes_leases)
        for commands in (chain.known, chain.predicted)
    )
    for ours, theirs in zip(predicted, known, strict=True):
        assert_same(by_batch(ours), by_batch(theirs))
        assert [o.num_slots_used for o in ours] == [o.num_slots_used for o in theirs]


@pytest.mark.parametrize("takes_leases", [False, True])
def test_a_group_may_shrink_to_the_one_that_samples(
    fabric: SocketFabric, folder: Path, takes_leases: bool
) -> None:
    lives = live_requests({"temperature": 0.0})
    chain = Chain(lives, all_tokens(BareInstance(fabric, 0, folder, None, CpuBackend()), lives))
    chain.report((0, 1), keep_on=(0,))
    chain.report((0, 1))
    chain.report((0,))
    chain.report((0,))
    chain.report((0, 1))
    assert [batch.inputs[0].depends_on_batch_id for batch in chain.predicted] == [None, 1, 2, 3, 4]
    (ours, _), (theirs, _) = (
        run_commands(folder, 2, commands, takes_leases=takes_leases)
        for commands in (chain.predicted, chain.known)
    )
    assert_same(by_batch(ours), by_batch(theirs))


@pytest.mark.parametrize("takes_leases", [False, True])
@pytest.mark.parametrize("params", [PLAIN, PENALIZED], ids=["plain", "penalized"])
def test_a_batch_that_begins_before_the_one_before_has_ended_gives_the_same_tokens(
    fabric: SocketFabric, folder: Path, takes_leases: bool, params: Sequence[Mapping[str, object]]
) -> None:
    serial = BareInstance(
        fabric, 0, folder, None, CapturingBackend(H200_GRAPH_LIMITS, takes_leases=takes_leases)
    )
    lives = live_requests(*params)
    chain = all_ways_of_going_on(lives, all_tokens(serial, lives))
    outcomes = [serial.carry_out(later(command, 10)) for command in chain.known]
    backend = LateBackend(takes_leases=takes_leases)
    overlapping = OverlappingInstance(fabric, folder, backend)
    backend.story.clear()
    reported = overlapping.carry_out_all([later(command, 20) for command in chain.predicted])
    assert_same(reported, by_batch(outcomes))
    assert overlapping.num_slots_used == outcomes[-1].num_slots_used
    done = [batch_id for batch_id in backend.story if batch_id is not None]
    assert done == [20 + command.batch_id for command in chain.predicted]
    if params is PLAIN:
        assert backend.story[:9] == [None, None, 21, None, 22, None, 23, None, 24]
    for live in lives:
        overlapping.carry_out(ReleaseKV(live.request.request_id, (0,)))
    assert overlapping.num_slots_used == 0


@pytest.mark.parametrize("params", [PLAIN, PENALIZED], ids=["plain", "penalized"])
def test_it_does_so_if_the_one_before_ends_while_it_is_launched_and_that_is_reported_then(
    fabric: SocketFabric, folder: Path, params: Sequence[Mapping[str, object]]
) -> None:
    lives = live_requests(*params)
    tokens = all_tokens(BareInstance(fabric, 0, folder, None, CpuBackend()), lives)
    chain = Chain(lives, tokens)
    for num_present in (3, None, None, None, None):
        chain.report((0,), num_present=num_present)
    backend = LateBackend(takes_leases=False, launches_slowly=True)
    instance = OverlappingInstance(fabric, folder, backend)
    backend.story.clear()
    reported = instance.carry_out_all([later(command, 10) for command in chain.predicted])
    for live in lives:
        ours = of_request(live, reported)
        assert_same([ours], [tokens[live.request.request_id][: len(ours)]])
        assert ours
    assert backend.story == [None, 11, None, 12, None, 13, None, 14, None, 15]


def test_so_do_chunks_that_sample_nothing(fabric: SocketFabric, folder: Path) -> None:
    (live,) = live_requests({}, {"temperature": 0.0})[1:]
    tokens = all_tokens(BareInstance(fabric, 0, folder, None, CpuBackend()), [live])
    chain = Chain([live], tokens)
    for _ in range(5):
        chain.report((0,))
    backend = LateBackend(takes_leases=True)
    reported = OverlappingInstance(fabric, folder, backend).carry_out_all(
        [later(command, 10) for command in chain.predicted]
    )
    assert [len(batch) for batch in reported] == [0, 0, 1, 1, 1]
    assert of_request(live, reported) == tokens[live.request.request_id][:3]
    assert [batch_id for batch_id in backend.story if batch_id is not None] == [11, 12, 13, 14, 15]


@pytest.mark.parametrize("is_overlapping", [False, True])
@pytest.mark.parametrize("num_steps", [1, 3])
def test_a_request_that_ended_by_its_token_ends_with_one_more_and_others_go_on(
    fabric: SocketFabric, folder: Path, is_overlapping: bool, num_steps: int
) -> None:
    serial = BareInstance(fabric, 0, folder, None, CapturingBackend(H200_GRAPH_LIMITS))
    first, second, ending = lives = live_requests({"temperature": 0.0}, {}, {"seed": 1, "num_logprobs": 0})
    tokens = all_tokens(serial, lives)
    stop = tokens[ending.request.request_id][2].token_id
    params = replace(ending.request.sampling_params, stop_token_ids=(stop,), min_tokens=2)
    ending.request = replace(ending.request, sampling_params=params)
    chain = Chain(lives, tokens)
    for _ in range(3):
        chain.report((0,))
    chain.report((0,), num_steps=num_steps)
    commands = [later(command, 10) for command in chain.predicted]
    if is_overlapping:
        reported = OverlappingInstance(fabric, folder, LateBackend(takes_leases=True)).carry_out_all(commands)
    else:
        reported = by_batch([serial.carry_out(command) for command in commands])
    reasons = [token.finish_reason for token in of_request(ending, reported)]
    assert reasons == [None, None, FinishReason.STOP, FinishReason.LENGTH]
    for live, num_tokens in ((first, 3 + num_steps), (second, 1 + num_steps)):
        expected = tokens[live.request.request_id][:num_tokens]
        assert [t[:3] for t in of_request(live, reported)] == [t[:3] for t in expected]


def of_request(live: LiveRequest, reported: Sequence[Sequence[ProducedToken]]) -> list[ProducedToken]:
    return [token for batch in reported for token in batch if token.request_id == live.request.request_id]


@pytest.mark.parametrize("depends_on_batch_id", [1, 3])
def test_who_is_to_follow_another_batch_than_the_last_is_refused(
    fabric: SocketFabric, folder: Path, depends_on_batch_id: int
) -> None:
    instance = BareInstance(fabric, 0, folder, None, CpuBackend())
    lives = live_requests({"temperature": 0.0})
    chain = Chain(lives, all_tokens(BareInstance(fabric, 0, folder, None, CpuBackend()), lives))
    for _ in range(3):
        chain.report((0,))
    first, second, third = (later(command, 10) for command in chain.predicted)
    instance.carry_out(first)
    instance.carry_out(second)
    (given,) = third.inputs
    third = replace(third, inputs=(given._replace(depends_on_batch_id=10 + depends_on_batch_id),))
    with pytest.raises(
        InvalidPlanError,
        match=f"depends on batch {10 + depends_on_batch_id} .* batch 12 was the last",
    ):
        instance.carry_out(third)


def test_who_is_to_follow_a_batch_that_did_not_sample_it_is_refused(
    fabric: SocketFabric, folder: Path
) -> None:
    serial = BareInstance(fabric, 0, folder, None, CpuBackend())
    lives = live_requests({"temperature": 0.0}, {"temperature": 0.0})
    chain = Chain(lives, all_tokens(serial, lives))
    chain.report((0,))
    chain.report((0,), num_present=1)
    first, second = (later(command, 10) for command in chain.predicted)
    only_the_other = BatchPlan(first.plan.group, first.plan.queries[1:], first.plan.writes[1:])
    first = replace(first, plan=only_the_other, inputs=first.inputs[1:])
    serial.carry_out(first)
    refusal = "depends on batch 11, which samples no token of it on instance 0"
    with pytest.raises(InvalidPlanError, match=refusal):
        serial.carry_out(second)
    overlapping = OverlappingInstance(fabric, folder, LateBackend(takes_leases=True))
    first, second = later(first, 10), later(second, 10)
    with pytest.raises(InvalidPlanError, match=refusal.replace("11", "21")):
        overlapping.carry_out_all([first, second])
