"""Captured steps of prompts and decodes give the tokens of those that the host launches."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from bare_instance import BareInstance
from capturing_backend import CapturingBackend
from families import each_kind
from machines import H200_GRAPH_LIMITS
from plans import both, decode, prefill
from requests_for_tests import greedy_request, random_prompt

from loong.core.cost.cuda_graph_limits import CudaGraphLimits
from loong.core.events import ProducedToken
from loong.core.instructions import RunScoredBatch
from loong.core.plan import BatchPlan, Transfer
from loong.core.prompt_logprobs import PromptLogprobs
from loong.fabric.messages.socket_fabric import SocketFabric
from loong.fabric.world import World
from loong.state.live_request import LiveRequest
from loong.worker.backend import CpuBackend
from loong.worker.steps import mixed_inputs


class ReplayingBackend(CapturingBackend):
    """Captures by keeping the call, and counts replays."""

    def __init__(self, limits: CudaGraphLimits) -> None:
        super().__init__(limits)
        self.num_replays = 0

    def capture(self, call: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            self.num_replays += 1
            call()

        return replay


class Script:
    """The same batches on an instance that captures its steps, and on one that does not."""

    def __init__(self, fabric: SocketFabric, folder: Path, **limits: int) -> None:
        self._backend = ReplayingBackend(replace(H200_GRAPH_LIMITS, **limits))
        self._instances = [
            BareInstance(fabric, 0, folder, None, backend) for backend in (self._backend, CpuBackend())
        ]
        for instance in self._instances:
            instance.poison()
        self._num_batches = 0

    def take(self, plan: BatchPlan, lives: Sequence[LiveRequest]) -> bool:
        """Run one batch, and give its tokens to the requests. Return whether its step was captured."""
        num_replays = self._backend.num_replays
        inputs = tuple(live.input_for(plan) for live in lives)
        scored = tuple(chunk for live in lives if (chunk := live.scored_chunk(plan)) is not None)
        reported: list[list[ProducedToken]] = []
        found: list[tuple[PromptLogprobs, ...]] = []
        for instance in self._instances:
            self._num_batches += 1
            outcome = instance.carry_out(RunScoredBatch(self._num_batches, plan, inputs, scored))
            reported.append([token for _, token in outcome.tokens])
            found.append(outcome.prompt_logprobs)
        assert [token.token_id for token in reported[0]] == [token.token_id for token in reported[1]]
        assert chosen(reported[0]) == pytest.approx(chosen(reported[1]), abs=1e-5)
        assert [part.request_id for part in found[0]] == [chunk.request_id for chunk in scored]
        for part, other in zip(*found, strict=True):
            assert (part.positions, part.ranks, part.top_ids) == (other.positions, other.ranks, other.top_ids)
            assert part.chosen == pytest.approx(other.chosen, abs=1e-5)
        tokens = {token.request_id: token.token_id for token in reported[0]}
        for live in lives:
            live.placement = live.placement.adding(plan.writes_of(live.request.request_id))
            if live.request.request_id in tokens:
                live.output_token_ids.append(tokens[live.request.request_id])
        return self._backend.num_replays > num_replays


def chosen(tokens: Sequence[ProducedToken]) -> list[float]:
    return [token.logprobs.chosen for token in tokens if token.logprobs is not None]


def prefill_and_decode(
    lives: Sequence[LiveRequest], num_tokens: int, transfer: Transfer = Transfer.QUERY
) -> BatchPlan:
    """Return a chunk of each prompt that is not computed, and one token of each request whose prompt is."""
    views = [live.view() for live in lives]
    prompts = [view for view in views if not view.is_decoding]
    decodes = [view for view in views if view.is_decoding]
    chunks = prefill(prompts, (0,), num_tokens=num_tokens, transfer=transfer)
    return both(chunks, decode(decodes, (0,), {view.request_id: 0 for view in decodes}))


@pytest.fixture
def fabric(tmp_path: Path) -> Iterator[SocketFabric]:
    fabric = SocketFabric(tmp_path, World(1, 1), 0, deadline=1.0)
    yield fabric
    fabric.close()


@pytest.fixture
def script(fabric: SocketFabric, folder: Path) -> Script:
    return Script(fabric, folder)


def live_requests(*lengths: int) -> list[LiveRequest]:
    return [LiveRequest(greedy_request(random_prompt(n, seed=n), 9)) for n in lengths]


@each_kind
@pytest.mark.parametrize("transfer", Transfer)
@pytest.mark.parametrize("num_tokens", [7, 16, 100])
def test_chunks_of_ragged_prompts_beside_decodes_are_captured_and_give_the_same_tokens(
    script: Script, transfer: Transfer, num_tokens: int
) -> None:
    lives = live_requests(1, 40, 5, 23, 2)
    for num_present in (2, 2, 4, 5, 5, 5):
        present = lives[:num_present]
        assert script.take(prefill_and_decode(present, num_tokens, transfer), present)


@pytest.mark.parametrize("transfer", Transfer)
def test_prompts_are_scored_in_captured_steps_too(script: Script, transfer: Transfer) -> None:
    lives = [
        LiveRequest(replace(live.request, num_prompt_logprobs=count))
        for live, count in zip(live_requests(40, 5, 23), (2, None, 0), strict=True)
    ]
    for _ in range(4):
        assert script.take(prefill_and_decode(lives, 16, transfer), lives)


def test_decodes_alone_that_the_host_must_look_at_are_captured(script: Script) -> None:
    lives = live_requests(9, 30)
    for _ in range(4):
        assert script.take(prefill_and_decode(lives, 30), lives)
    assert [len(live.output_token_ids) for live in lives] == [4, 4]


def test_steps_of_more_rows_than_any_that_was_captured_are_launched_by_the_host(
    fabric: SocketFabric, folder: Path
) -> None:
    script = Script(fabric, folder, most_rows=32)
    lives = live_requests(3, 30)
    assert not script.take(prefill_and_decode(lives, 30), lives)
    assert script.take(prefill_and_decode(lives, 30), lives)


def test_so_are_steps_of_more_prompts_than_there_is_room_for(fabric: SocketFabric, folder: Path) -> None:
    script = Script(fabric, folder, most_prompts=2)
    lives = live_requests(8, 5, 20, 21, 22)
    assert script.take(prefill_and_decode(lives[:2], 20), lives[:2])
    assert not script.take(prefill_and_decode(lives, 20), lives)


def test_so_are_steps_of_more_decodes_than_there_is_room_for(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives = live_requests(8, 5, 20, 21)
    assert script.take(prefill_and_decode(lives[:2], 20), lives[:2])
    monkeypatch.setattr(mixed_inputs, "MAX_DECODES", 1)
    assert not script.take(prefill_and_decode(lives, 20), lives)


@pytest.mark.parametrize(
    ("least_queries", "were_captured"),
    [(8, [True, True, True, True, False, False]), (17, [True] * 6)],
)
def test_so_are_steps_with_so_many_keys_that_the_device_is_busier_than_the_host(
    fabric: SocketFabric, folder: Path, least_queries: int, were_captured: list[bool]
) -> None:
    """With each chunk of 16 there are 256 more pairs, next to 136 with keys of its own."""
    script = Script(
        fabric,
        folder,
        least_copied=16,
        least_queries=least_queries,
        most_pairs=136 + 16 * 24 + 3 * 256,
        row_pairs=24,
    )
    lives = live_requests(100)
    assert [script.take(prefill_and_decode(lives, 16), lives) for _ in range(6)] == were_captured


def test_a_token_behind_keys_that_were_copied_is_the_same(fabric: SocketFabric, folder: Path) -> None:
    script = Script(fabric, folder, least_copied=16, least_queries=8, most_copied=128)
    lives = live_requests(64)
    assert [script.take(prefill_and_decode(lives, 16), lives) for _ in range(4)] == [True] * 4
    assert len(lives[0].output_token_ids) == 1


def test_lists_of_slots_that_are_too_long_are_too(fabric: SocketFabric, folder: Path) -> None:
    script = Script(fabric, folder, most_rows=150, keys_a_row=1, lists_a_slot=0)
    lives = live_requests(120, 60)
    assert script.take(prefill_and_decode(lives[:1], 120), lives[:1])
    assert not script.take(prefill_and_decode(lives, 120), lives)
