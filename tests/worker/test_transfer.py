"""Migrations between processes, and between the two pools of one: all rows arrive, or nothing changes."""

import pytest
import torch
from bare_instance import bare_config
from socket_worlds import run_in_world

from loong.core.instructions import MoveKV
from loong.core.kv_layout import KVLayout
from loong.core.placement import InstanceId, KVSegment
from loong.core.plan import KVMigration
from loong.fabric.messages.socket_fabric import SocketFabric
from loong.fabric.world import World
from loong.worker.kv.pool import KVPool
from loong.worker.transfer import SegmentMover

OWNER, NUM_LAYERS, NUM_TOKENS = "request", 3, 9000  # more than two messages
POSITIONS = (range(5), range(1, 100, 7), range(8999, 9000), range(NUM_TOKENS))
NUM_SLOTS = 2 * NUM_TOKENS
LAYOUT = KVLayout(NUM_LAYERS, (64,), "uint8")  # rows that only kernels could read
NEVER = 600.0  # a deadline no test lives to see


def make_mover(
    fabric: SocketFabric, instance_id: InstanceId, num_slots: int
) -> tuple[SegmentMover, dict[InstanceId, KVPool]]:
    """Return one of two instances, with a pool of its own and a host tier of the same size."""
    config = bare_config(instance_id, 2, num_slots, num_slots)
    pools = {
        pool_id: KVPool(LAYOUT, num_slots, torch.device("cpu"))
        for pool_id in (instance_id, config.own_tier_id)
    }
    return SegmentMover(config, pools, fabric), pools


def rows_of(layer: int, positions: range) -> torch.Tensor:
    """Return rows [n, 64] that no other layer or position has."""
    firsts = torch.tensor(positions, dtype=torch.float32)[:, None] * 100 + 20 * layer
    return (firsts + torch.arange(16.0)).view(torch.uint8)


def fill(pool: KVPool, positions: range) -> None:
    slots = pool.allocate(OWNER, positions)
    pool.scatter(slots, torch.stack([rows_of(layer, positions) for layer in range(NUM_LAYERS)]))


def holds(pool: KVPool, positions: range) -> bool:
    slots = pool.slots(OWNER, positions)
    return torch.equal(pool.gather(slots), torch.stack([rows_of(i, positions) for i in range(NUM_LAYERS)]))


def moving(number: int, positions: range, source_id: InstanceId, destination_id: InstanceId) -> MoveKV:
    return MoveKV(number, KVMigration(KVSegment(OWNER, positions, source_id), destination_id))


def move_there_and_back(
    fabric: SocketFabric, instance_id: InstanceId, tp_rank: int, source_id: int, destination_id: int
) -> list[int]:
    """Move every shape of segment there and back; the ends release as by the engine."""
    mover, pools = make_mover(fabric, instance_id, NUM_SLOTS)
    if source_id in pools:
        fill(pools[source_id], range(NUM_TOKENS))
    for number, positions in enumerate(POSITIONS):
        for migration_id, ends in (
            (2 * number, (source_id, destination_id)),
            (2 * number + 1, (destination_id, source_id)),
        ):
            assert mover.move(moving(migration_id, positions, *ends))
            if ends[1] in pools:
                assert holds(pools[ends[1]], positions)
            if ends[0] in pools:
                pools[ends[0]].release_positions([(OWNER, positions)])
    return [pool.num_used for pool in pools.values()]


@pytest.mark.parametrize(
    ("source_id", "destination_id", "num_used"),
    [
        (0, 1, [[NUM_TOKENS, 0], [0, 0]]),
        (0, 2, [[NUM_TOKENS, 0], [0, 0]]),
        (1, 2, [[0, 0], [NUM_TOKENS, 0]]),
        (2, 3, [[0, NUM_TOKENS], [0, 0]]),
    ],
)
def test_any_segment_goes_between_any_two_pools_and_comes_back(
    source_id: int, destination_id: int, num_used: list[list[int]]
) -> None:
    assert run_in_world(move_there_and_back, World(2, 1), source_id, destination_id) == num_used


def move_where_there_is_no_room(fabric: SocketFabric, instance_id: InstanceId, tp_rank: int) -> list[bool]:
    """Return the destination's answers; the source may learn of the first failure before it is done."""
    mover, pools = make_mover(fabric, instance_id, num_slots=10)
    if instance_id == 0:
        fill(pools[0], range(10))
        fill(pools[2], range(10, 15))
    else:
        pools[1].allocate("neighbour", range(6))
    done = [
        mover.move(moving(0, range(5), 0, 1)),
        mover.move(moving(1, range(1, 9, 2), 0, 1)),
        instance_id == 1 or mover.move(moving(2, range(6), 0, 2)),
    ]
    if instance_id == 0:
        assert holds(pools[0], range(10))
        assert [pools[0].num_used, pools[2].num_used] == [10, 5]
    else:
        assert holds(pools[1], range(1, 9, 2))
        assert pools[1].num_used == 10
    return done if instance_id == 1 else done[1:]


def test_a_pool_without_room_takes_nothing_and_takes_the_next_segment_that_fits() -> None:
    assert run_in_world(move_where_there_is_no_room, World(2, 1)) == [
        [True, False],
        [False, True, True],
    ]


def move_what_is_not_all_there(
    fabric: SocketFabric, instance_id: InstanceId, tp_rank: int, num_there: int
) -> list[bool]:
    """Move a segment of which the source has only the first few tokens, and one that it has."""
    mover, pools = make_mover(fabric, instance_id, NUM_SLOTS)
    if instance_id == 0:
        fill(pools[0], range(num_there))
    done = [mover.move(moving(0, range(NUM_TOKENS), 0, 1))]
    if instance_id == 1:
        pools[1].release(OWNER)  # as the engine would do
    done.append(mover.move(moving(1, range(num_there), 0, 1)))
    assert holds(pools[instance_id], range(num_there))
    return done


@pytest.mark.parametrize("num_there", [3, 5000], ids=["none sent", "one message sent"])
def test_a_segment_that_is_not_there_fails_at_both_ends_at_once_and_the_next_arrives(num_there: int) -> None:
    results = run_in_world(move_what_is_not_all_there, World(2, 1), num_there, deadline=NEVER)
    assert results == [[False, True], [False, True]]
