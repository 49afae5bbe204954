"""Every verb between real processes: what is sent arrives where it should, and is counted once."""

import itertools
from collections.abc import Mapping
from contextlib import suppress
from threading import Thread

import pytest
import torch
from socket_worlds import Carrier, run_in_world

from loong.fabric.errors import AbandonedError, InvalidMessageError
from loong.fabric.protocol import Fabric, NoPeers, OpenBatch, ring_step
from loong.fabric.traffic import Channel, Sent, TrafficSnapshot
from loong.fabric.world import World

MUCH = 400_000  # numbers: hundreds of pieces where there are any, each asked for by three calls
Pair = tuple[int, int]  # of instances: who sends, and who receives
# Each instance has each place, and sends to each other.
RINGS: tuple[tuple[int, ...], ...] = (
    *((i,) for i in range(4)),
    *itertools.permutations(range(4), 2),
    *((0, 1, 2), (3, 2, 1), (2, 3, 0), (1, 0, 3)),
    *((0, 1, 3, 2), (1, 2, 0, 3), (2, 3, 1, 0), (3, 0, 2, 1)),
)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64)


def block(owner: int, size: int = 6, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return (torch.arange(size) + 100 * owner).to(dtype)


def rotate(batch: OpenBatch, instance_id: int, tp_rank: int, ring: tuple[int, ...]) -> list[list[int]]:
    """The blocks that came by, in order, in a full turn of a ring whose blocks have owner + 1 entries."""
    place = ring.index(instance_id)
    seen = []
    held = block(instance_id, instance_id + 1)
    for step in range(1, len(ring) + 1):
        owner = ring[place - step]
        incoming = torch.empty(owner + 1, dtype=torch.int64)
        ring_step(batch, ring, held, incoming).wait()
        seen.append(incoming.tolist())
        held = incoming
    return seen


def rotate_every_ring(fabric: Fabric, instance_id: int, tp_rank: int) -> int:
    for batch_id, ring in enumerate(RINGS):
        if instance_id in ring:
            with fabric.batch(batch_id, ring) as batch:
                seen = rotate(batch, instance_id, tp_rank, ring)
            place = ring.index(instance_id)
            owners = [ring[place - step] for step in range(1, len(ring) + 1)]
            assert seen == [block(owner, owner + 1).tolist() for owner in owners]
    return len(RINGS)


def test_a_full_turn_of_any_ring_shows_every_block_once_whatever_their_sizes(carrier: Carrier) -> None:
    assert run_in_world(rotate_every_ring, World(4, 1), carrier=carrier) == [len(RINGS)] * 4


def rotate_apart(fabric: Fabric, instance_id: int, tp_rank: int) -> list[list[int]]:
    ring = (1, 0) if instance_id < 2 else (2, 3)
    seen: list[list[int]] = []
    for batch_id in range(20 if instance_id < 2 else 5):
        with fabric.batch(batch_id, ring) as batch:
            seen = rotate(batch, instance_id, tp_rank, ring)
    return seen


def test_disjoint_groups_run_at_their_own_pace(carrier: Carrier) -> None:
    results = run_in_world(rotate_apart, World(4, 1), carrier=carrier)
    assert results == [[block(i ^ 1, (i ^ 1) + 1).tolist(), block(i, i + 1).tolist()] for i in range(4)]


def exchange_much(fabric: Fabric, instance_id: int, tp_rank: int, sizes: Mapping[Pair, int]) -> None:
    outgoing = {to: block(to, size) for (sender, to), size in sizes.items() if sender == instance_id}
    incoming = {
        sender: torch.empty(size, dtype=torch.int64)
        for (sender, to), size in sizes.items()
        if to == instance_id
    }
    with fabric.batch(0, (0, 1, 2)) as batch:
        batch.exchange(outgoing, incoming, Channel.QUERIES).wait()
        for tensor in incoming.values():
            assert tensor.tolist() == block(instance_id, len(tensor)).tolist()


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({(0, 1): MUCH, (1, 2): MUCH, (2, 0): MUCH}, id="in a circle"),
        pytest.param({(0, 1): MUCH, (1, 2): MUCH, (1, 0): MUCH, (2, 0): 1}, id="uneven"),
    ],
)
def test_messages_that_no_queue_holds_are_exchanged(sizes: Mapping[Pair, int], carrier: Carrier) -> None:
    run_in_world(exchange_much, World(3, 1), sizes, carrier=carrier)


def skip_empty_blocks(fabric: Fabric, instance_id: int, tp_rank: int) -> tuple[list[int], Sent]:
    sizes = (0, 3, 0)
    incoming = torch.empty(sizes[instance_id - 1], dtype=torch.int64)
    with fabric.batch(0, (0, 1, 2)) as batch:
        ring_step(batch, (0, 1, 2), block(instance_id, sizes[instance_id]), incoming).wait()
    return incoming.tolist(), fabric.traffic.snapshot().total


def test_an_empty_block_is_no_message(carrier: Carrier) -> None:
    assert run_in_world(skip_empty_blocks, World(3, 1), carrier=carrier) == [
        ([], Sent(0, 0)),
        ([], Sent(1, 24)),
        ([100, 101, 102], Sent(0, 0)),
    ]


def send_every_dtype(fabric: Fabric, instance_id: int, tp_rank: int) -> None:
    for batch_id, dtype in enumerate(DTYPES):
        incoming = torch.empty((2, 3), dtype=dtype)
        with fabric.batch(batch_id, (0, 1)) as batch:
            ring_step(batch, (0, 1), block(instance_id, dtype=dtype).view(2, 3), incoming).wait()
        assert torch.equal(incoming, block(1 - instance_id, dtype=dtype).view(2, 3))


def test_every_dtype_of_a_model_travels(carrier: Carrier) -> None:
    run_in_world(send_every_dtype, World(2, 1), carrier=carrier)


def exchange_as_masters(fabric: Fabric, instance_id: int, tp_rank: int) -> TrafficSnapshot:
    """Instances 0 and 2 are masters: their queries go to everyone, partials come back."""
    masters, group = (0, 2), (0, 1, 2)
    others = [i for i in group if i != instance_id]
    is_master = instance_id in masters
    queries = {i: torch.empty(6, dtype=torch.int64) for i in masters if i != instance_id}
    partials = {i: torch.empty(6, dtype=torch.int64) for i in others if is_master}
    with fabric.batch(3, group) as batch:
        back = batch.exchange({i: block(10 * instance_id + i) for i in queries}, partials, Channel.PARTIALS)
        out = batch.exchange(
            dict.fromkeys(others, block(instance_id)) if is_master else {}, queries, Channel.QUERIES
        )
        out.wait()
        back.wait()
    assert all(torch.equal(tensor, block(i)) for i, tensor in queries.items())
    assert all(torch.equal(tensor, block(10 * i + instance_id)) for i, tensor in partials.items())
    return fabric.traffic.snapshot()


def test_an_exchange_reaches_only_the_peers_it_names_and_keeps_channels_apart(carrier: Carrier) -> None:
    snapshots = run_in_world(exchange_as_masters, World(3, 1), carrier=carrier)
    sent = [(s[Channel.QUERIES], s[Channel.PARTIALS]) for s in snapshots if isinstance(s, TrafficSnapshot)]
    assert sent == [(Sent(2, 96), Sent(1, 48)), (Sent(), Sent(2, 96)), (Sent(2, 96), Sent(1, 48))]


def migrate_during_a_ring(fabric: Fabric, instance_id: int, tp_rank: int) -> bool:
    """A segment of 8 MB from 0 to 1, in halves, while the same two rotate small blocks."""
    halves = [torch.full((1 << 19,), float(half)) for half in (1, 2)]
    received = [torch.zeros(1 << 19) for _ in halves]

    def migrate() -> None:
        with fabric.migration(7, 1 - instance_id) as migration:
            for sent, into in zip(halves, received, strict=True):
                pending = migration.send(sent) if instance_id == 0 else migration.receive(into)
                pending.wait()

    migration = Thread(target=migrate)
    migration.start()
    for batch_id in range(50):
        with fabric.batch(batch_id, (0, 1)) as batch:
            rotate(batch, instance_id, tp_rank, (0, 1))
    migration.join()
    return instance_id == 0 or all(map(torch.equal, halves, received))


def test_a_migration_runs_beside_the_batches_of_the_same_instances(carrier: Carrier) -> None:
    assert run_in_world(migrate_during_a_ring, World(2, 1), carrier=carrier) == [True, True]


def shard_of(tp_rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tp_rank)
    return torch.randn(3, 4, generator=generator, device="cpu").half()


def reduce_and_gather(
    fabric: Fabric, instance_id: int, tp_rank: int
) -> tuple[torch.Tensor, torch.Tensor, Sent]:
    x = shard_of(tp_rank).to(torch.get_default_device())
    with fabric.batch(0, (instance_id,)):
        total = fabric.tensor_parallel.all_reduce(x)
        gathered = fabric.tensor_parallel.all_gather(x)
    return total.float().cpu(), gathered.float().cpu(), fabric.traffic.snapshot()[Channel.TENSOR_PARALLEL]


def test_every_tensor_parallel_rank_gets_bitwise_the_same(carrier: Carrier) -> None:
    results = run_in_world(reduce_and_gather, World(2, 2), carrier=carrier)
    shards = [shard_of(tp_rank) for tp_rank in (0, 1)]
    for result in results:
        assert isinstance(result, tuple)
        total, gathered, sent = result
        assert torch.equal(total, (shards[0].float() + shards[1].float()).half().float())
        assert torch.equal(gathered, torch.cat(shards, dim=-1).float())
        assert sent == Sent(2, 48)


def rotate_head_shards(fabric: Fabric, instance_id: int, tp_rank: int) -> list[int]:
    incoming = torch.empty(2, dtype=torch.int64)
    with fabric.batch(0, (1, 0)) as batch:
        ring_step(batch, (1, 0), block(10 * instance_id + tp_rank, 2), incoming).wait()
    return incoming.tolist()


def test_a_ring_joins_equal_tensor_parallel_ranks_only(carrier: Carrier) -> None:
    results = run_in_world(rotate_head_shards, World(2, 2), carrier=carrier)
    assert results == [block(owner, 2).tolist() for owner in (10, 11, 0, 1)]


def agree(
    fabric: Fabric, instance_id: int, tp_rank: int, groups: list[tuple[int, ...]]
) -> tuple[list[dict[int, list[int]]], Sent]:
    heard = []
    for batch_id, group in enumerate(groups):
        if instance_id in group:
            with fabric.batch(batch_id, group) as batch:
                payload = torch.tensor([instance_id, tp_rank, batch_id], device="cpu")
                answers = batch.exchange_control(group, payload)
            heard.append({i: answer.tolist() for i, answer in answers.items()})
    return heard, fabric.traffic.snapshot()[Channel.CONTROL]


def test_control_reports_every_process_what_rank_0_of_each_instance_said(carrier: Carrier) -> None:
    groups = [(0, 1), (1, 0)]
    heard = [{i: [i, 0, batch_id] for i in group} for batch_id, group in enumerate(groups)]
    speaker, listener = (heard, Sent(6, 6 * 24)), (heard, Sent())
    assert run_in_world(agree, World(2, 2), groups, carrier=carrier) == [speaker, listener, speaker, listener]


def test_control_of_one_process_sends_nothing(carrier: Carrier) -> None:
    assert run_in_world(agree, World(1, 1), [(0,)], carrier=carrier) == [([{0: [0, 0, 0]}], Sent())]


def leave_messages_behind(fabric: Fabric, instance_id: int, tp_rank: int) -> list[int]:
    """Instance 0 sends twice in batch 0; instance 1 takes one, and must not find the other in batch 1."""
    nothing = torch.empty(0, dtype=torch.int64)
    incoming = torch.empty(6, dtype=torch.int64)
    for batch_id, num_sent in ((0, 2), (1, 1)):
        with fabric.batch(batch_id, (0, 1)) as batch:
            if instance_id == 0:
                for number in range(num_sent):
                    ring_step(batch, (0, 1), block(10 * batch_id + number), nothing).wait()
            else:
                ring_step(batch, (0, 1), nothing, incoming).wait()
    return incoming.tolist()


def test_what_is_left_of_one_batch_is_not_taken_for_the_next(carrier: Carrier) -> None:
    assert run_in_world(leave_messages_behind, World(2, 1), carrier=carrier)[1] == block(10).tolist()


def fail_then_receive_another(fabric: Fabric, instance_id: int, tp_rank: int) -> list[int]:
    incoming = torch.empty(6, dtype=torch.int64)
    for migration_id in (5, 6):
        with (
            suppress(AbandonedError, ZeroDivisionError),
            fabric.migration(migration_id, 1 - instance_id) as migration,
        ):
            if instance_id == 0:
                migration.send(block(migration_id)).wait()
            elif migration_id == 5:
                raise ZeroDivisionError
            else:
                migration.receive(incoming).wait()
    return incoming.tolist()


def test_what_is_left_of_a_failed_migration_is_not_taken_for_the_next(carrier: Carrier) -> None:
    assert run_in_world(fail_then_receive_another, World(2, 1), carrier=carrier)[1] == block(6).tolist()


def misuse(fabric: Fabric, instance_id: int, tp_rank: int) -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(InvalidMessageError, match=r"ring with \[[01]\] in a step without peers"):
        ring_step(NoPeers(instance_id), (0, 1), x, x)
    with pytest.raises(InvalidMessageError, match="opened a batch of"), fabric.batch(0, (1 - instance_id,)):
        pass
    with fabric.batch(4, (0, 1)) as batch:
        with pytest.raises(InvalidMessageError, match=r"\(3, 2\) with strides \(1, 3\) is not contiguous"):
            ring_step(batch, (0, 1), x.T, x)
        with pytest.raises(InvalidMessageError, match="instance 2 is not in the group"):
            batch.exchange({2: x}, {}, Channel.QUERIES)
        with (
            pytest.raises(InvalidMessageError, match="batch 5 opened inside batch 4"),
            fabric.batch(5, (0, 1)),
        ):
            pass
    with pytest.raises(InvalidMessageError, match="batch 4 after batch 4"), fabric.batch(4, (0, 1)):
        pass
    misuse_a_migration(fabric, 1 - instance_id)


def misuse_a_migration(fabric: Fabric, peer_id: int) -> None:
    with (
        fabric.migration(4, peer_id),
        pytest.raises(InvalidMessageError, match="migration 5 opened inside migration 4"),
        fabric.migration(5, peer_id),
    ):
        pass
    with (
        pytest.raises(InvalidMessageError, match="migration 3 after migration 4"),
        fabric.migration(3, peer_id),
    ):
        pass


def test_a_caller_that_breaks_a_rule_is_reported_which(carrier: Carrier) -> None:
    run_in_world(misuse, World(2, 1), carrier=carrier)
