"""Captured decode steps serve groups on GPUs as they change, and are captured once."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import pytest
import torch
from bare_instance import BareInstance, Outcome
from group_leases import NUM_TOKENS, Lease, LeaseScript
from socket_worlds import Carrier, run_in_world

from loong.core.instructions import ReleaseKV, RunBatch
from loong.core.placement import InstanceId
from loong.fabric.protocol import Fabric
from loong.fabric.world import World
from loong.worker.cuda_backend import CudaBackend

pytestmark = pytest.mark.multigpu

Commands = Sequence[RunBatch | ReleaseKV]


class CountingBackend(CudaBackend):
    """Counts what it captures. Its prompts are short, so it need not warm up for them."""

    def __init__(self, index: int) -> None:
        super().__init__(index, torch.float32)
        self.warm_up_lengths = ()
        self.num_captured = 0

    def capture(self, call: Callable[[], None]) -> Callable[[], None]:
        self.num_captured += 1
        return super().capture(call)


def run(
    fabric: Fabric, instance_id: InstanceId, tp_rank: int, folder: Path, commands: Commands, way: bool
) -> tuple[list[Outcome], int]:
    torch.set_default_device("cpu")
    backend = CountingBackend(instance_id % torch.cuda.device_count())
    backend.takes_leases = way
    instance = BareInstance(fabric, instance_id, folder, None, backend)
    num_captured = backend.num_captured
    outcomes = [instance.carry_out(command) for command in commands]
    assert backend.num_captured == num_captured
    return outcomes, num_captured


def run_all(folder: Path, num_instances: int, commands: Commands, way: bool) -> list[list[Outcome]]:
    """Return the outcomes of all instances, once each has captured its steps."""
    world, carrier = World(num_instances, 1), Carrier.GPU_ARENAS
    by_rank = run_in_world(run, world, folder, commands, way, carrier=carrier, seconds=150.0)
    outcomes, counts = zip(*cast("list[tuple[list[Outcome], int]]", by_rank), strict=True)
    assert len(set(counts)) == 1
    assert (counts[0] > 0) is way
    return list(outcomes)


@pytest.mark.parametrize(
    ("num_instances", "leases"),
    [
        (2, [Lease((1, 0), (0, 1, 0, 0), 5), Lease((0, 1), (1, 1, 1, 1), 3), Lease((0, 1), (0, 1, 1, 0), 4)]),
        (
            4,
            [
                Lease((1, 0), (0, 1, 0, 0), 4),
                Lease((0, 2, 1), (2, 2, 2, 2), 3),
                Lease((3, 1, 0, 2), (1, 3, 0, 3), 5),
                Lease((0, 1, 2, 3), (0, 0, 0, 0), 2),
            ],
        ),
    ],
)
def test_groups_that_change_between_leases_give_the_tokens_of_transformers_and_of_steps_launched_by_the_host(
    folder: Path, num_instances: int, leases: list[Lease]
) -> None:
    script = LeaseScript(folder, (0, 1), [NUM_TOKENS] * 4)
    for lease in leases:
        script.lease(lease)
    launched, captured = (run_all(folder, num_instances, script.commands, way) for way in (False, True))
    for live in script.lives:
        name = live.request.request_id
        for by_rank in (launched, captured):
            outcomes = [outcome for reported in zip(*by_rank, strict=True) for outcome in reported]
            tokens = [token.token_id for o in outcomes for _, token in o.tokens if token.request_id == name]
            assert tokens == live.output_token_ids
    for ours, theirs in zip(captured, launched, strict=True):
        assert [o.num_slots_used for o in ours] == [o.num_slots_used for o in theirs]
