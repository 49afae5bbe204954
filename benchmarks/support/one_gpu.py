"""One instance on one GPU without an engine or a socket, controlled by benchmarks."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import TypeAlias

import torch

from loong.core.attention_kernels import AttentionKernels
from loong.core.cost.work import StepWork, step_work
from loong.core.instance import ESPGroup
from loong.core.instructions import RequestInput, RunBatch
from loong.core.placement import KVSegment, Placement
from loong.core.plan import BatchPlan, QueryBlock, Transfer
from loong.core.request import SamplingParams
from loong.fabric.messages.socket_fabric import SocketFabric
from loong.fabric.world import World
from loong.hardware.devices import DEVICES
from loong.model.config import ModelConfig
from loong.model.load import load_model
from loong.model.shapes import find_config
from loong.model.tensor_parallel import SingleDevice
from loong.worker.batches.lease_ends import LeaseEnds
from loong.worker.cuda_backend import CudaBackend
from loong.worker.kv.pool import KVPool
from loong.worker.runner import BatchRunner

BYTES_PER_SECOND = 4.3e12  # an H200's reading, and its matrix products
FLOPS_PER_SECOND = 790e12
PARAMS = SamplingParams(max_tokens=1 << 30, temperature=0.0)

_Part: TypeAlias = tuple[QueryBlock, KVSegment, RequestInput]  # of one request in a batch


@dataclass(frozen=True)
class Floors:
    """The least times of one GPU, from the bytes and operations of a model, in seconds."""

    layer_parameters: float
    output_parameters: float
    kv_bytes: float
    pair_flops: float

    def prefill(self, num_tokens: int) -> float:
        """Return the floor of all tokens of a prompt."""
        flops = 2 * self.layer_parameters * num_tokens + self.pair_flops * num_tokens**2 / 2
        return flops / FLOPS_PER_SECOND

    def decode(self, num_requests: int, context: int, dop: int = 1) -> float:
        """Return the floor of a step of requests of equal length, on GPUs that share their KV evenly."""
        weights = 2 * (self.layer_parameters + self.output_parameters)
        return (weights + num_requests * context * self.kv_bytes / dop) / BYTES_PER_SECOND

    @classmethod
    def of(cls, config: ModelConfig) -> "Floors":
        """Return the floors of a model."""
        mlp, hidden = 3 * config.intermediate_size, config.hidden_size
        heads = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
        return cls(
            layer_parameters=config.num_layers * hidden * (heads + mlp),
            output_parameters=hidden * config.vocab_size,
            kv_bytes=config.kv_layout().bytes_per_token,
            pair_flops=4 * config.num_layers * config.num_heads * config.head_dim,
        )


@dataclass(frozen=True)
class PromptStep:
    """A chunk of a prompt after its history, with decodes of `context` tokens each."""

    num_tokens: int
    num_cached: int
    num_decodes: int
    context: int


class OneGpu:
    """A model with dummy weights and a runner; `seconds_to_start` is the time of the warm-up.

    Without captured steps, the host launches all kernels.
    """

    def __init__(
        self,
        model: str,
        num_slots: int,
        *,
        is_captured: bool = True,
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
    ) -> None:
        torch.set_num_threads(1)  # as workers do
        config = find_config(model, "dummy", None, quantization, kv_cache_dtype)
        kernels = AttentionKernels.TRITON if config.has_fp8_kv else AttentionKernels.AUTO
        limits = DEVICES["h200"].graph_limits
        backend = CudaBackend(0, config.torch_dtype, graph_limits=limits, kernels=kernels)
        backend.device.use()
        decoder = load_model(
            model, "dummy", None, 0, SingleDevice(), backend.device, quantization, kv_cache_dtype
        )
        self._pool = KVPool(config.kv_layout(), num_slots, backend.device.torch_device)
        with TemporaryDirectory() as folder:
            sockets = SocketFabric(Path(folder), World(1, 1), 0, deadline=1.0)
            fabric = backend.connect(sockets, decoder.shard)
            backend.takes_leases = is_captured
            self._runner = BatchRunner(0, decoder, self._pool, fabric, backend)
        begun_at = perf_counter()
        self._runner.warm_up()
        self.seconds_to_start = perf_counter() - begun_at
        self.floors = Floors.of(config)
        self._num_batches = 0

    def prefill(self, num_tokens: int, chunk: int) -> float:
        """Return the seconds from a random prompt to its first token, in chunks of `chunk` tokens."""
        owner_id, tokens = "prompt", torch.randint(1000, (num_tokens,)).tolist()
        held, seconds = Placement(), 0.0
        for start in range(0, num_tokens, chunk):
            positions = range(start, min(start + chunk, num_tokens))
            segment = KVSegment(owner_id, positions, 0)
            block = QueryBlock(owner_id, positions, 0, Transfer.KV)
            params = PARAMS if positions.stop == num_tokens else None
            given = RequestInput(owner_id, tokens[start : positions.stop], num_tokens, 0, held, params)
            taken, _ = self._run(BatchPlan(ESPGroup((0,)), (block,), (segment,)), [given])
            held, seconds = held.adding((segment,)), seconds + taken
        self._pool.release(owner_id)
        return seconds

    def decode(self, num_requests: int, context: int, num_steps: int) -> list[float]:
        """Return the seconds between the tokens of a lease; the KV before it is arbitrary."""
        decodes = [self._decode_of(number, context, num_steps) for number in range(num_requests)]
        _, times = self._run_all(decodes, num_steps)
        return [later - earlier for earlier, later in pairwise(times)]

    def run_prompt(self, step: PromptStep) -> float:
        """Return the seconds of such a step, as a server takes it."""
        seconds, _ = self._run_all(self._parts_of(step), 1)
        return seconds

    def work_of(self, step: PromptStep) -> StepWork:
        """Return the work of a step after the worker has received it."""
        queries, writes, inputs = zip(*self._parts_of(step), strict=True)
        placements = {given.request_id: given.placement for given in inputs}
        for request_id in placements:
            self._pool.release(request_id)
        return step_work(BatchPlan(ESPGroup((0,)), queries, writes), placements, is_first=False)

    def _parts_of(self, step: PromptStep) -> list[_Part]:
        """Return the parts of a step with random tokens; the KV before them is arbitrary."""
        history = range(step.num_cached)
        positions = range(step.num_cached, step.num_cached + step.num_tokens)
        self._pool.allocate("prompt", history)
        held = Placement((KVSegment("prompt", history, 0),) if history else ())
        block, segment = QueryBlock("prompt", positions, 0, Transfer.QUERY), KVSegment("prompt", positions, 0)
        tokens = torch.randint(1000, (step.num_tokens,)).tolist()
        given = RequestInput("prompt", tokens, positions.stop, 0, held, PARAMS)
        decodes = [self._decode_of(number, step.context, 1) for number in range(step.num_decodes)]
        return [(block, segment, given), *decodes]

    def _decode_of(self, number: int, context: int, num_steps: int) -> _Part:
        owner_id = f"request-{number}"
        self._pool.allocate(owner_id, range(context))
        held = Placement((KVSegment(owner_id, range(context), 0),))
        block = QueryBlock(owner_id, range(context, context + 1), 0, Transfer.QUERY)
        segment = KVSegment(owner_id, range(context, context + num_steps), 0)
        return block, segment, RequestInput(owner_id, [number], context, 1, held, PARAMS)

    def _run_all(self, parts: Sequence[_Part], num_steps: int) -> tuple[float, list[float]]:
        """Run parts as `_run` does; the requests' slots are free afterwards."""
        queries, writes, inputs = zip(*parts, strict=True)
        ran = self._run(BatchPlan(ESPGroup((0,)), queries, writes, num_steps), inputs)
        for given in inputs:
            self._pool.release(given.request_id)
        return ran

    def _run(self, plan: BatchPlan, inputs: Sequence[RequestInput]) -> tuple[float, list[float]]:
        """Return the seconds of a batch, and when each of its steps was reported."""
        times: list[float] = []
        self._num_batches += 1
        command = RunBatch(self._num_batches, plan, tuple(inputs))
        begun_at = perf_counter()
        end = LeaseEnds(deadline=1.0).of(command)
        self._runner.run(command, end, lambda *_: times.append(perf_counter()))
        return perf_counter() - begun_at, times
