"""Measures a worker's host for one captured step of prompts and decodes, without the device.

A real `BatchRunner` takes steps as in serving: decodes grow by a token each, prompts by a chunk, and every
step arrives in a frame. Graphs replay nothing and logits are zeros, so only the host's work remains: read the
frame, find slots, prepare the step, sample, and count. A GPU would be idle during that time. In a group,
instance 0 is measured. Times are least, and medians in brackets. Ceiling: none; a step of such a load takes
40 ms.
"""

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import cast

import torch

sys.path.append(str(Path(__file__).parents[1] / "support"))

from result import print_result, script_parser
from torch import Tensor

from loong.core.cost.cuda_graph_limits import CudaGraphLimits
from loong.core.instance import ESPGroup
from loong.core.instructions import RequestInput, RunBatch
from loong.core.kv_layout import KVLayout, row_of_heads
from loong.core.placement import InstanceId, Placement, striped
from loong.core.plan import QueryBlock, Transfer
from loong.core.request import SamplingParams
from loong.fabric.lanes import Lane
from loong.fabric.messages.socket_fabric import SocketFabric
from loong.fabric.protocol import Fabric, NoPeers, OpenBatch
from loong.fabric.world import World
from loong.hardware.devices import DEVICES
from loong.messages.wire import decode_command, encode
from loong.model.shapes import SHAPES
from loong.model.tensor_parallel import Shard
from loong.model.transformer import Decoder
from loong.scheduler.common.striping import RequestPart, batch_of
from loong.worker.backend import CpuBackend
from loong.worker.batches.lease_ends import LeaseEnds
from loong.worker.kv.pool import KVPool
from loong.worker.runner import BatchRunner
from loong.worker.steps.group_exchange import GroupExchange, KVExchange, NoExchange
from loong.worker.steps.ring_inputs import MAX_KV_ROOM

NUM_STEPS, NUM_FIRST = 60, 10  # of which the first do not count
MAX_TOKENS = 2 * NUM_STEPS
VOCAB = 16


class NothingExchanged(NoExchange):
    """An exchange of steps that are not run. See KVExchange."""

    max_kv_room = MAX_KV_ROOM

    def __init__(self, num_instances: int) -> None:
        self.num_instances = num_instances

    def gather_kv(self, layer: int, block: Tensor) -> Tensor:  # noqa: ARG002 - see KVExchange
        """See KVExchange."""
        return block

    def services(self) -> Mapping[Lane, GroupExchange]:
        """See KVExchange."""
        return {}


class NothingReplayed(CpuBackend):
    """Captures graphs of nothing."""

    def __init__(self, graph_limits: CudaGraphLimits) -> None:
        super().__init__()
        self.takes_leases, self.graph_limits = True, graph_limits

    def group_exchange(
        self,
        fabric: Fabric,
        instance_id: InstanceId,  # noqa: ARG002 - see Backend
        shard: Shard,  # noqa: ARG002 - see Backend
    ) -> KVExchange | None:
        """See Backend."""
        return NothingExchanged(fabric.world.num_instances)

    def capture(self, call: Callable[[], None]) -> Callable[[], None]:  # noqa: ARG002 - see Backend
        """See Backend."""
        return lambda: None


class NobodyThere(SocketFabric):
    """A group in which the other members send and receive nothing."""

    @contextmanager
    def batch(
        self,
        batch_id: int,  # noqa: ARG002 - see Fabric
        group: tuple[InstanceId, ...],  # noqa: ARG002 - see Fabric
        holders: tuple[InstanceId, ...] = (),  # noqa: ARG002 - see Fabric
    ) -> Iterator[OpenBatch]:
        """See Fabric."""
        yield NoPeers(self.world.instance_id(self.rank))


@dataclass(frozen=True)
class NoModel:
    """The shape of a model, whose logits are all 0."""

    shard: Shard

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [N, V] of rows [N, E]."""
        return torch.zeros(len(hidden), VOCAB)


@dataclass
class Story:
    """Requests whose next step `group` computes, prompts in chunks.

    The KV of decodes is on their masters, or if `is_spread`, over the group as that of prompts.
    """

    group: ESPGroup
    num_decodes: int
    num_prompts: int
    context: int
    chunk: int
    is_spread: bool

    def __post_init__(self) -> None:
        ids = self.group.instance_ids
        names = [f"d{i}" for i in range(self.num_decodes)] + [f"p{i}" for i in range(self.num_prompts)]
        self.masters = {name: ids[i % len(ids)] for i, name in enumerate(names)}
        self.placements = {name: striped(name, range(self.context), self._holders(name)) for name in names}

    def step(self, number: int) -> RunBatch:
        """Return the next step; its prompts end far later."""
        shares, inputs = [], []
        for name, placement in self.placements.items():
            is_decode = name.startswith("d")
            first, count = placement.num_tokens, 1 if is_decode else self.chunk
            new = striped(name, range(first, first + count), self._makers(name, is_decode=is_decode))
            shares.append(_share(new))
            params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0) if is_decode else None
            length = self.context if is_decode else 1 << 30
            inputs.append(RequestInput(name, [1] * count, length, number + 1, placement, params))
            self.placements[name] = placement.adding(new.segments)
        return RunBatch(number + 1, batch_of(self.group, shares), tuple(inputs))

    def _holders(self, name: str) -> tuple[int, ...]:
        is_spread = self.is_spread or not name.startswith("d")
        return self.group.instance_ids if is_spread else (self.masters[name],)

    def _makers(self, name: str, *, is_decode: bool) -> tuple[int, ...]:
        return (self.masters[name],) if is_decode else self.group.instance_ids


def _share(new: Placement) -> RequestPart:
    blocks = [QueryBlock(s.owner_id, s.positions, s.instance_id, Transfer.QUERY) for s in new.segments]
    return RequestPart(tuple(blocks), new.segments)


def measure(story: Story) -> list[float]:
    """Return the seconds of each step."""
    shard = Shard(SHAPES["llama-3.1-8b"], 0, 1)
    pool = KVPool(KVLayout(1, row_of_heads(1, 1), "float32"), 1 << 20, torch.device("cpu"))
    with TemporaryDirectory() as folder:
        fabric = NobodyThere(Path(folder), World(story.group.dop, 1), 0, deadline=1.0)
        model = cast("Decoder", NoModel(shard))
        runner = BatchRunner(
            0,
            model,
            pool,
            fabric,
            NothingReplayed(DEVICES["h200"].graph_limits),
        )
        runner.warm_up()
        for name, placement in story.placements.items():
            for positions in placement.on(0):
                pool.allocate(name, positions)
        gc.freeze()  # as workers do
        seconds, no_end = [], LeaseEnds(1.0)
        for number in range(NUM_STEPS):
            frame = encode(story.step(number))
            start = perf_counter()
            command = decode_command(frame)
            assert isinstance(command, RunBatch)
            runner.run(command, no_end.of(command), lambda *_: None)
            seconds.append(perf_counter() - start)
        fabric.close()
    return seconds[NUM_FIRST:]


def main() -> None:
    parser = script_parser("step_host", __doc__)
    parser.add_argument(
        "--cases",
        nargs="+",
        default=["1:32:2:2000:100", "1:200:1:1000:100", "2:64:2:4000:200", "8:32:5:20000:400"],
        help="cases, each INSTANCES:DECODES:PROMPTS:CONTEXT:TOKENS of each prompt (%(default)s)",
    )
    parser.add_argument("--spread", action="store_true", help="spread the KV of decodes over all instances")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for case in args.cases:
        dop, num_decodes, num_prompts, context, chunk = map(int, case.split(":"))
        group = ESPGroup(tuple(range(dop)))
        seconds = measure(Story(group, num_decodes, num_prompts, context, chunk, is_spread=args.spread))
        print(f"{case:>24}  {1e3 * min(seconds):.2f} ms ({1e3 * median(seconds):.2f})")
        rows.append({"case": case, "least": min(seconds), "median": median(seconds)})
    print_result("step_host", {"is_spread": args.spread, "rows": rows}, save=args.save)


if __name__ == "__main__":
    main()
