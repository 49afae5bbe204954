"""Steps whose queries travel by puts of the device give the tokens of transformers, on any group."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
import torch
from bare_instance import BareInstance, Outcome
from families import write_tiny_model
from plans import both, decode, prefill
from requests_for_tests import expected, greedy_request, random_prompt
from socket_worlds import Carrier, run_in_world

from loong.attention.exchange import MessageExchange, QueryExchange
from loong.attention.put_exchange import PutExchange
from loong.core.instructions import RunBatch
from loong.core.placement import InstanceId
from loong.core.plan import BatchPlan, Transfer
from loong.fabric.errors import PeerLostError
from loong.fabric.memory.symmetric import SymmetricFabric
from loong.fabric.protocol import Fabric
from loong.fabric.traffic import Channel
from loong.fabric.world import World
from loong.model.tensor_parallel import Shard
from loong.state.live_request import LiveRequest
from loong.worker.backend import Backend, CpuBackend
from loong.worker.cuda_backend import CudaBackend

MOST_ROWS = 10
NUM_TOKENS = 8  # of each request, at most


class PutBackend(CpuBackend):
    """A processor whose groups exchange by the kernels of GPUs."""

    def query_exchange(self, fabric: Fabric, shard: Shard) -> QueryExchange:
        return put_exchange(self, fabric, shard)


class GpuPutBackend(CudaBackend):
    """A GPU that launches all its steps, and has as little room as in tests without one."""

    def __init__(self, index: int) -> None:
        super().__init__(index, torch.float32)
        self.warm_up_lengths, self.takes_leases = (), False

    def query_exchange(self, fabric: Fabric, shard: Shard) -> QueryExchange:
        return put_exchange(self, fabric, shard)


def put_exchange(backend: Backend, fabric: Fabric, shard: Shard) -> QueryExchange:
    assert isinstance(fabric, SymmetricFabric)
    messages = MessageExchange(fabric, backend.device)
    exchange = PutExchange(fabric.arena, shard, backend.device, messages, MOST_ROWS)
    exchange.warm_up()
    return exchange


class SubmittedBatches:
    """Batches in order, as from an engine that knows the tokens of all requests."""

    def __init__(self, folder: Path, *lengths: int) -> None:
        self._folder = folder
        prompts = [random_prompt(length, seed=length) for length in lengths]
        self.lives = [
            LiveRequest(greedy_request(prompt, NUM_TOKENS, num_logprobs=None)) for prompt in prompts
        ]
        self.commands: list[RunBatch] = []

    def report(self, plan: BatchPlan) -> None:
        """Run a batch, which takes all its steps."""
        concerned = [live for live in self.lives if live.request.request_id in plan.request_ids]
        inputs = tuple(live.input_for(plan) for live in concerned)
        self.commands.append(RunBatch(1 + len(self.commands), plan, inputs))
        for live in concerned:
            tokens, _ = expected(self._folder, live.request.prompt_token_ids, NUM_TOKENS)
            live.placement = live.placement.adding(plan.writes_of(live.request.request_id))
            num_known = live.placement.num_tokens + 1 - len(live.request.prompt_token_ids)
            live.output_token_ids += tokens[len(live.output_token_ids) : max(0, num_known)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture
def reported(folder: Path) -> SubmittedBatches:
    """Return prompts with decodes, on groups that change; the last prompt has too many rows for puts."""
    reported = SubmittedBatches(folder, 20, 14, 7, 30)
    a, b, c, d = reported.lives
    reported.report(prefill([a.view(), b.view()], (0, 1), num_tokens=9))
    reported.report(prefill([a.view(), b.view()], (2, 0, 1), masters=(1, 2), transfer=Transfer.QUERY))
    masters = {a.request.request_id: 2, b.request.request_id: 0}
    chunk = prefill([c.view()], (1, 0, 2), masters=(0, 1), transfer=Transfer.QUERY)
    reported.report(both(chunk, decode([a.view(), b.view()], (1, 0, 2), masters)))
    reported.report(
        decode([a.view(), b.view(), c.view()], (0, 2, 1), {**masters, c.request.request_id: 1}, num_steps=2)
    )
    reported.report(prefill([d.view()], (0, 1), transfer=Transfer.QUERY))
    return reported


def run(
    fabric: Fabric, instance_id: InstanceId, tp_rank: int, folder: Path, commands: Sequence[RunBatch]
) -> list[Outcome]:
    is_on_gpu = torch.get_default_device().type == "cuda"
    torch.set_default_device("cpu")
    backend = GpuPutBackend(instance_id % torch.cuda.device_count()) if is_on_gpu else PutBackend()
    instance = BareInstance(fabric, instance_id, folder, None, backend)
    return [instance.carry_out(command) for command in commands]


@pytest.mark.parametrize(
    "carrier", [Carrier.ARENAS, pytest.param(Carrier.GPU_ARENAS, marks=pytest.mark.multigpu)]
)
def test_prompts_and_decodes_in_groups_that_change_have_the_tokens_of_transformers(
    folder: Path, reported: SubmittedBatches, carrier: Carrier
) -> None:
    by_rank = cast(
        "list[list[Outcome]]", run_in_world(run, World(3, 1), folder, reported.commands, carrier=carrier)
    )
    tokens = [token for step in zip(*by_rank, strict=True) for outcome in step for _, token in outcome.tokens]
    for live in reported.lives:
        name = live.request.request_id
        assert [token.token_id for token in tokens if token.request_id == name] == live.output_token_ids
    messages = [[outcome.traffic[Channel.QUERIES].messages for outcome in outcomes] for outcomes in by_rank]
    assert messages == [[0, 0, 0, 0, 2], [0, 0, 0, 0, 2], [0, 0, 0, 0, 0]]


def lose_a_member(
    fabric: Fabric, instance_id: InstanceId, tp_rank: int, folder: Path, commands: Sequence[RunBatch]
) -> str:
    """Return the error of a batch of which a member dies, on one that is left."""
    instance = BareInstance(fabric, instance_id, folder, None, PutBackend())
    first, second = commands[:2]
    instance.carry_out(first)
    if instance_id == 1:
        os._exit(0)
    with pytest.raises(PeerLostError) as raised:
        instance.carry_out(second)
    return str(raised.value)


def test_a_step_ends_at_once_when_a_member_is_lost(folder: Path, reported: SubmittedBatches) -> None:
    survivors = run_in_world(
        lose_a_member, World(3, 1), folder, reported.commands, carrier=Carrier.ARENAS, num_victims=1
    )
    assert all(
        str(survivors[i]).endswith("batch 2: instance 1 (tensor-parallel rank 0) is lost") for i in (0, 2)
    )
