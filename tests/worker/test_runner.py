"""Batches on real processes, without an engine: what they send, and where their leases end."""

from itertools import chain, combinations
from pathlib import Path

import pytest
import torch
from bare_instance import Stop
from bare_worlds import run_commands
from families import write_tiny_model
from plans import decode, prefill
from requests_for_tests import expected, greedy_request, random_prompt

from loong.core.instructions import ReleaseKV, RunBatch
from loong.core.plan import BatchPlan
from loong.fabric.messages.socket_fabric import SocketFabric
from loong.fabric.traffic import Channel
from loong.fabric.world import World
from loong.model.load import load_model
from loong.model.tensor_parallel import SingleDevice
from loong.state.live_request import LiveRequest
from loong.worker.backend import CpuBackend
from loong.worker.kv.pool import KVPool
from loong.worker.runner import BatchRunner

NUM_LAYERS, TOKEN_BYTES = 2, 2 * 2 * 8 * 4  # K and V of 2 heads of 8 numbers of 4 bytes
GROUP = (2, 0, 3, 1)
SUBSETS = tuple(chain.from_iterable(combinations(range(4), size) for size in range(1, 5)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model("llama", tmp_path_factory.mktemp("model"))


def command(batch_id: int, plan: BatchPlan, *lives: LiveRequest) -> RunBatch:
    """Return the command of an engine; the requests are updated as if it were done."""
    inputs = tuple(live.input_for(plan) for live in lives)
    for live in lives:
        live.placement = live.placement.adding(plan.writes_of(live.request.request_id))
    return RunBatch(batch_id, plan, inputs)


def test_retention_by_any_instances_costs_no_message_and_no_byte(folder: Path) -> None:
    num_history, num_chunk = 22, 31
    commands: list[RunBatch | ReleaseKV] = []
    for number, keep_on in enumerate(SUBSETS):
        live = LiveRequest(greedy_request(random_prompt(num_history + num_chunk, seed=1), 2))
        history = prefill([live.view()], GROUP, num_tokens=num_history)
        commands.append(command(2 * number, history, live))
        chunk = prefill([live.view()], GROUP, keep_on=keep_on)
        commands.append(command(2 * number + 1, chunk, live))
        commands.append(ReleaseKV(live.request.request_id, GROUP))
    by_rank = run_commands(folder, 4, commands)
    for instance_id, outcomes in enumerate(by_rank):
        traffic = [outcome.traffic for outcome in outcomes[1::3]]
        assert traffic == [traffic[0]] * len(SUBSETS)
        assert traffic[0].total == traffic[0][Channel.RING]
        assert traffic[0].total.messages == NUM_LAYERS * 3
        for keep_on, before, after in zip(SUBSETS, outcomes[::3], outcomes[1::3], strict=True):
            share = (
                range(num_chunk)[keep_on.index(instance_id) :: len(keep_on)] if instance_id in keep_on else ()
            )
            assert after.num_slots_used - before.num_slots_used == len(share)
    num_bytes = sum(outcomes[1].traffic.total.num_bytes for outcomes in by_rank)
    assert num_bytes == NUM_LAYERS * 3 * (num_history + num_chunk) * TOKEN_BYTES


@pytest.mark.parametrize("leader_id", [0, 2])
@pytest.mark.parametrize(
    ("stop", "num_steps"),
    [
        (Stop(1), 1),
        (Stop(4), 4),
        (Stop(2, reported_in=5), 5),  # known too late
        (Stop(7, reported_in=3), 7),
        (Stop(12), 9),  # all requests are over before
        (None, 9),
    ],
)
def test_a_lease_ends_at_one_step_for_all_when_its_leader_says_so_or_nobody_is_left(
    folder: Path, leader_id: int, stop: Stop | None, num_steps: int
) -> None:
    lives = [LiveRequest(greedy_request(random_prompt(9 + n, seed=n), n + 1)) for n in (3, 9, 6)]
    others = [i for i in range(3) if i != leader_id]
    commands: list[RunBatch | ReleaseKV] = []
    commands.append(command(0, prefill([live.view() for live in lives], (0, 1, 2)), *lives))
    for live in lives:
        live.output_token_ids += expected(folder, live.request.prompt_token_ids, 10)[0][:1]
    masters = {live.request.request_id: i for i, live in enumerate(lives)}
    lease = decode([live.view() for live in lives], (leader_id, *others), masters, num_steps=15)
    commands.append(command(1, lease, *lives))
    stops = {i: Stop(1) for i in others}  # they are not asked
    by_rank = run_commands(folder, 4, commands, stops if stop is None else {**stops, leader_id: stop})
    assert [outcomes[1].num_steps for outcomes in by_rank] == [num_steps] * 3 + [0]
    for instance_id, live in enumerate(lives):
        tokens = expected(folder, live.request.prompt_token_ids, 10)[0]
        num_tokens = min(num_steps, live.request.sampling_params.max_tokens - 1)
        produced = [(step, token.token_id) for step, token in by_rank[instance_id][1].tokens]
        assert produced == list(enumerate(tokens[1 : 1 + num_tokens]))


def test_warming_up_leaves_no_slot_taken(folder: Path, tmp_path: Path) -> None:
    model = load_model(str(folder), "safetensors", None, 0, SingleDevice())
    config, backend = model.shard.config, CpuBackend()
    backend.warm_up_lengths = (5, 300, 301)  # of which the last is longer than the pool
    pool = KVPool(model.shard.kv_layout, 300, torch.device("cpu"))
    fabric = SocketFabric(tmp_path, World(1, 1), 0, deadline=1.0)
    for layer in range(config.num_layers):
        pool.layer(layer).fill_(torch.nan)
    BatchRunner(0, model, pool, fabric, backend).warm_up()
    assert pool.num_used == 0
    assert not any(pool.layer(layer).isnan().any() for layer in range(config.num_layers))
