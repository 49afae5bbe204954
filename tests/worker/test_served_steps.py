"""Steps that the host launches reach KV of instances outside their groups, over memory that all map."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
import torch
from bare_instance import BareInstance, Outcome, WeightlessInstance
from families import write_tiny_model
from plans import both, decode, prefill
from requests_for_tests import expected, greedy_request, random_prompt
from socket_worlds import Carrier, run_in_world

from loong.core.instructions import RunBatch
from loong.core.placement import InstanceId
from loong.core.plan import BatchPlan, Transfer
from loong.fabric.errors import PeerLostError
from loong.fabric.protocol import Fabric
from loong.fabric.traffic import Channel
from loong.fabric.world import World
from loong.state.live_request import LiveRequest
from loong.worker.backend import CpuBackend

NUM_TOKENS = 12  # of each request, at most
QUERY = Transfer.QUERY


class Script:
    """Greedy requests and their batches, as from an engine that knows their tokens."""

    def __init__(self, folder: Path, *lengths: int) -> None:
        self._folder = folder
        prompts = [random_prompt(length, seed=length) for length in lengths]
        self.lives = [LiveRequest(greedy_request(p, NUM_TOKENS, num_logprobs=None)) for p in prompts]
        self.commands: list[RunBatch] = []

    def run(self, plan: BatchPlan) -> None:
        """Run a batch, which takes all its steps."""
        concerned = [live for live in self.lives if live.request.request_id in plan.request_ids]
        inputs = tuple(live.input_for(plan) for live in concerned)
        self.commands.append(RunBatch(1 + len(self.commands), plan, inputs))
        for live in concerned:
            tokens, _ = expected(self._folder, live.request.prompt_token_ids, NUM_TOKENS)
            live.placement = live.placement.adding(plan.writes_of(live.request.request_id))
            num_known = live.placement.num_tokens + 1 - len(live.request.prompt_token_ids)
            live.output_token_ids += tokens[len(live.output_token_ids) : max(0, num_known)]

    def step(self, group: Sequence[InstanceId], *places: int, num_steps: int = 1) -> BatchPlan:
        """Return a decode of the requests at these places, whose masters are those of the group in turn."""
        lives = [self.lives[place] for place in places]
        masters = {live.request.request_id: group[n % len(group)] for n, live in enumerate(lives)}
        return decode([live.view() for live in lives], group, masters, num_steps=num_steps)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture
def of_two(folder: Path) -> Script:
    """Return batches of one of two instances each: chunks, decodes and both meet KV of the other."""
    script = Script(folder, 29, 14, 31)
    a, b, c = script.lives
    script.run(prefill([a.view()], (0,), num_tokens=12))
    script.run(prefill([a.view()], (1,), num_tokens=9, transfer=QUERY))
    script.run(prefill([c.view()], (0,), num_tokens=10))
    script.run(prefill([a.view()], (1,), transfer=QUERY))
    script.run(both(prefill([b.view()], (1,), transfer=QUERY), script.step((1,), 0)))
    script.run(prefill([c.view()], (0,), num_tokens=8, transfer=QUERY, keep_on=(1,)))
    script.run(prefill([c.view()], (0,), num_tokens=8, transfer=QUERY, keep_on=(0, 1)))
    script.run(prefill([c.view()], (0,), transfer=QUERY))
    script.run(script.step((1,), 0, 1, 2))
    script.run(script.step((0,), 0, 1, 2, num_steps=3))
    script.run(script.step((1,), 0, 1, 2))
    return script


@pytest.fixture
def of_one(folder: Path) -> Script:
    """Return batches of instance 0, which reads KV on instance 1 and pushes KV there."""
    script = Script(folder, 29, 14)
    a, b = script.lives
    script.run(prefill([a.view()], (0,), num_tokens=12))
    script.run(prefill([a.view()], (0,), num_tokens=9, transfer=QUERY, keep_on=(1,)))
    script.run(prefill([b.view()], (0,), transfer=QUERY, keep_on=(1,)))
    script.run(prefill([a.view()], (0,), transfer=QUERY, keep_on=(1, 0)))
    script.run(script.step((0,), 0, 1))
    script.run(script.step((0,), 0, 1, num_steps=3))
    return script


@pytest.fixture
def of_three(folder: Path) -> Script:
    """Return batches of groups of two, with all kinds of transfers, and a third instance outside."""
    script = Script(folder, 29, 31)
    a, b = script.lives
    script.run(prefill([a.view(), b.view()], (0, 2), num_tokens=13))
    script.run(prefill([a.view()], (2, 1), num_tokens=9, transfer=QUERY))
    script.run(prefill([b.view()], (0, 2), num_tokens=9, keep_on=(2, 1, 0)))
    script.run(prefill([a.view()], (1, 0), transfer=QUERY, keep_on=(2,)))
    script.run(both(prefill([b.view()], (1, 0), transfer=QUERY), script.step((1, 0), 0)))
    script.run(script.step((2,), 1))
    script.run(script.step((1,), 0, num_steps=2))
    script.run(script.step((2, 1), 0, 1, num_steps=2))
    return script


@pytest.fixture
def of_two_hosts(folder: Path) -> Script:
    """Return batches of groups on both hosts, and others that the neighbor serves; the hosts take turns."""
    script = Script(folder, 29, 14, 31)
    a, b, c = script.lives
    script.run(prefill([a.view()], (0, 2), num_tokens=13))
    script.run(prefill([b.view()], (1, 3)))
    script.run(prefill([a.view()], (2,), transfer=QUERY))
    script.run(prefill([c.view()], (0, 1, 2, 3), num_tokens=17))
    script.run(script.step((3,), 1, num_steps=3))
    script.run(script.step((0,), 0))
    script.run(prefill([c.view()], (1, 0, 3, 2), transfer=QUERY))
    script.run(both(script.step((0, 1, 2, 3), 0), script.step((0, 1, 2, 3), 2)))
    script.run(script.step((1,), 1))
    return script


def make_backend() -> CpuBackend:
    """Return the backend of tests on processors or, where tensors are made on GPUs, one that launches all."""
    fabric_device = torch.get_default_device()
    if fabric_device.type != "cuda":
        return CpuBackend()
    from loong.worker.cuda_backend import CudaBackend  # not at the top: it needs Triton for GPUs

    torch.set_default_device("cpu")
    backend = CudaBackend(fabric_device.index, torch.float32)
    backend.warm_up_lengths, backend.takes_leases = (16,), False  # all kernels are loaded before
    return cast("CpuBackend", backend)


def run(
    fabric: Fabric,
    instance_id: InstanceId,
    tp_rank: int,
    folder: Path,
    commands: Sequence[RunBatch],
    weightless_ids: Sequence[InstanceId] = (),
) -> list[Outcome]:
    backend = make_backend()
    instance: BareInstance | WeightlessInstance
    if instance_id in weightless_ids:
        instance = WeightlessInstance(fabric, instance_id, folder, backend)
    else:
        instance = BareInstance(fabric, instance_id, folder, None, backend)
        instance.poison()
    outcomes = [instance.carry_out(command) for command in commands]
    instance.end_service()
    return outcomes


def check(
    script: Script,
    num_instances: int,
    folder: Path,
    carrier: Carrier,
    weightless_ids: Sequence[InstanceId] = (),
    tp_size: int = 1,
) -> list[list[Outcome]]:
    """All tokens are those of transformers."""
    world = World(num_instances, tp_size)
    ran = run_in_world(run, world, folder, script.commands, weightless_ids, carrier=carrier)
    by_rank = cast("list[list[Outcome]]", ran)[::tp_size]
    tokens = [token for step in zip(*by_rank, strict=True) for outcome in step for _, token in outcome.tokens]
    for live in script.lives:
        name = live.request.request_id
        assert [token.token_id for token in tokens if token.request_id == name] == live.output_token_ids
    return by_rank


@pytest.mark.parametrize(
    "carrier", [Carrier.ARENAS, pytest.param(Carrier.GPU_ARENAS, marks=pytest.mark.multigpu)]
)
def test_steps_reach_kv_of_an_instance_that_runs_its_own_steps(
    folder: Path, of_two: Script, carrier: Carrier
) -> None:
    by_rank = check(of_two, 2, folder, carrier)
    traffic = [outcome.traffic for outcomes in by_rank for outcome in outcomes]
    for channel in (Channel.SERVED_QUERIES, Channel.SERVED_PARTIALS, Channel.SERVED_KV):
        assert any(sent[channel].messages for sent in traffic)


@pytest.mark.parametrize(
    "carrier",
    [Carrier.SOCKETS, Carrier.ARENAS, pytest.param(Carrier.GPU_ARENAS, marks=pytest.mark.multigpu)],
)
def test_each_rank_serves_its_own_rank(folder: Path, of_two: Script, carrier: Carrier) -> None:
    check(of_two, 2, folder, carrier, tp_size=2)


@pytest.mark.parametrize("carrier", [Carrier.ARENAS, Carrier.SOCKETS])
def test_an_instance_without_weights_keeps_kv_and_serves_it(
    folder: Path, of_one: Script, carrier: Carrier
) -> None:
    of_weightless = check(of_one, 2, folder, carrier, weightless_ids=(1,))[1]
    kept = [live.placement.tokens_by_instance()[1] for live in of_one.lives]
    assert of_weightless[-1].num_slots_used == sum(kept) > 0


@pytest.mark.parametrize("carrier", [Carrier.ARENAS, Carrier.SOCKETS])
def test_so_do_those_of_larger_groups(folder: Path, of_three: Script, carrier: Carrier) -> None:
    check(of_three, 3, folder, carrier)


@pytest.mark.parametrize(
    "carrier", [Carrier.HOSTS_OF_ARENAS, pytest.param(Carrier.HOSTS_OF_GPUS, marks=pytest.mark.multigpu)]
)
def test_so_they_do_within_a_host_between_batches_of_several(
    folder: Path, of_two_hosts: Script, carrier: Carrier
) -> None:
    by_rank = check(of_two_hosts, 4, folder, carrier)
    traffic = [outcome.traffic for outcomes in by_rank for outcome in outcomes]
    assert any(sent[Channel.SERVED_QUERIES].messages for sent in traffic)


def lose_the_other(
    fabric: Fabric,
    instance_id: InstanceId,
    tp_rank: int,
    folder: Path,
    commands: Sequence[RunBatch],
    victim_id: InstanceId,
) -> str:
    """Return the error of a step on one instance that another serves, after one of them has died."""
    instance = BareInstance(fabric, instance_id, folder, None, CpuBackend())
    prompt, step = commands[:2]
    instance.carry_out(prompt)
    if instance_id == victim_id:
        os._exit(0)
    try:
        instance.carry_out(step)
    except PeerLostError as error:
        return str(error)
    instance.end_service()
    return ""


@pytest.mark.parametrize(
    ("victim_id", "error"), [(0, "batch 2: instance 0 (tensor-parallel rank 0) is lost"), (1, "")]
)
def test_a_step_ends_at_once_with_its_holder_and_a_service_with_its_member(
    folder: Path, of_two: Script, victim_id: InstanceId, error: str
) -> None:
    world, carrier = World(2, 1), Carrier.ARENAS
    survivors = run_in_world(
        lose_the_other, world, folder, of_two.commands, victim_id, carrier=carrier, num_victims=1
    )
    assert str(survivors[1 - victim_id]).endswith(error)
