"""Ranks of an instance sum and all-gather: bitwise as the definition, and the same on all."""

from functools import reduce

import pytest
import torch
from socket_worlds import Carrier, run_in_world

from loong.fabric.protocol import Fabric
from loong.fabric.world import World

SHAPES = ((1, 1), (3, 5), (1, 4096), (37, 211), (2, 7000))  # beyond a program, a shard, an alignment, a round
DTYPES = (torch.float32, torch.float16)  # Triton's interpreter cannot round to bfloat16


def shards(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return every rank's, which depends on its shape."""
    generator = torch.Generator().manual_seed(shape[-1])
    drawn = torch.randn(size, *shape, generator=generator, device="cpu").to(dtype)
    return list(drawn.to(torch.get_default_device()))


def differences(fabric: Fabric, instance_id: int, tp_rank: int) -> list[str]:
    """Return differences from the definition, in a batch of each dtype with an odd number of calls."""
    group, found = fabric.tensor_parallel, []
    for batch_id, dtype in enumerate(DTYPES):
        with fabric.batch(batch_id, (instance_id,)):
            for shape in SHAPES:
                parts = shards(group.size, shape, dtype)
                total = reduce(torch.add, [part.float() for part in parts])
                if not torch.equal(group.all_reduce(parts[tp_rank]), total.to(dtype)):
                    found.append(f"sum of {shape} {dtype}")
            parts = shards(group.size, (7, 33), dtype)
            if not torch.equal(group.all_gather(parts[tp_rank]), torch.cat(parts, dim=-1)):
                found.append(f"gather of {dtype}")
            group.all_reduce(parts[tp_rank])
    return found


@pytest.mark.parametrize(
    "carrier",  # those on one host, as the ranks of an instance are
    [
        Carrier.SOCKETS,
        Carrier.ARENAS,
        Carrier.LINKS,
        *(
            pytest.param(carrier, marks=pytest.mark.multigpu)
            for carrier in (Carrier.GPU_ARENAS, Carrier.GPU_LINKS)
        ),
    ],
    ids=lambda carrier: carrier.value,
)
@pytest.mark.parametrize("tp_size", [1, 2, 3])
def test_sums_and_gathers_are_those_of_the_definition_whatever_their_size(
    tp_size: int, carrier: Carrier
) -> None:
    assert run_in_world(differences, World(1, tp_size), carrier=carrier) == [[]] * tp_size
