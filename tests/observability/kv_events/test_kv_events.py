"""Events of cached blocks: a subscriber that follows them knows what the prefix tree has."""

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random

import msgspec
import pytest
import zmq
from simulation import instances_with

from loong.core.errors import ConfigError
from loong.core.events import Event, InstanceJoined, InstanceLost, PrefixCacheReset
from loong.core.instance import ElasticInstance, InstanceKind
from loong.core.request import Request, SamplingParams
from loong.engine.loop import Scheduling
from loong.executor.simulated import SimulatedExecutor
from loong.observability.kv_events.blocks import CachedBlocks
from loong.observability.kv_events.config import KVEventsConfig, parsed_kv_events
from loong.observability.kv_events.messages import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    KVEventBatch,
)
from loong.observability.kv_events.observer import KVEvents
from loong.observability.kv_events.publisher import END_OF_REPLAY, KVPublisher
from loong.scheduler.config import PolicyConfig
from loong.scheduler.cost.cost_model import WorkCostModel
from loong.scheduler.policy import make_policy
from loong.state.cluster_state import ClusterState
from loong.state.owners import KVOwner
from loong.state.prefix_tree import PrefixTree

SIZE = 4
Block = tuple[str, tuple[int, ...]]
"""The salt, and all tokens up to the last of a block."""


class Router:
    """The blocks that a subscriber knows, by hash, each after the block before it."""

    def __init__(self) -> None:
        self.stored: dict[int, Block] = {}
        self.named: dict[int, Block] = {}  # also those that are gone

    def take(self, events: Iterable[KVCacheEvent]) -> None:
        for event in events:
            match event:
                case AllBlocksCleared():
                    self.stored.clear()
                case BlockRemoved():
                    for block_hash in event.block_hashes:
                        del self.stored[block_hash]
                case BlockStored():
                    self._store(event)

    def _store(self, event: BlockStored) -> None:
        if event.parent_block_hash is None:
            first = event.extra_keys[0] if event.extra_keys else None
            before: Block = (first[0] if first else "", ())
        else:
            before = self.named[event.parent_block_hash]
        for number, block_hash in enumerate(event.block_hashes):
            new = event.token_ids[number * event.block_size : (number + 1) * event.block_size]
            before = before[0], (*before[1], *new)
            assert block_hash not in self.stored
            self.stored[block_hash] = self.named[block_hash] = before

    @property
    def blocks(self) -> list[Block]:
        return sorted(self.stored.values())


def blocks_of(tree: PrefixTree) -> list[Block]:
    """Return all whole blocks of the sequences in a tree whose KV is there."""
    found: set[Block] = set()

    def walk(owner: KVOwner, salt: str, before: tuple[int, ...], held: tuple[bool, ...]) -> None:
        there = {p for segment in owner.placement.segments for p in segment.positions}
        tokens = (*before[: owner.start], *map(int, owner.token_ids))
        held = (*held[: owner.start], *(p in there for p in range(owner.start, owner.stop)))
        for stop in range(SIZE, len(tokens) + 1, SIZE):
            if all(held[stop - SIZE : stop]):
                found.add((salt, tokens[:stop]))
        for child in owner.children.values():
            walk(child, salt, tokens, held)

    for name, root in tree.roots.items():
        if root.is_kept:
            walk(root, name.removeprefix("salt-"), (), ())
    return sorted(found)


def followed(seed: int, put_of: Callable[[Router], Callable[[KVEventBatch], bool]]) -> tuple[Router, int]:
    """Run requests that share beginnings on small pools, and compare a router with the tree.

    Return the router, and how often it was right while it had missed nothing.
    """
    random = Random(seed)
    prompts = [
        tuple(random.choice((1, 2)) for _ in range(random.randint(0, 5))) + (3,) * random.randint(1, 12)
        for _ in range(40)
    ]
    params = SamplingParams(max_tokens=5)
    requests = [
        Request(f"r{n}", prompt, params, arrival_time=0.05 * n, cache_salt=random.choice(("", "", "s")))
        for n, prompt in enumerate(prompts)
    ]
    again = ElasticInstance(1, 1, InstanceKind.FULL, 60)
    incidents: list[Event] = [
        InstanceLost(0.61, 1, "test"),
        InstanceJoined(0.82, again),
        PrefixCacheReset(1.53),
    ]
    state, model, router = (
        ClusterState(instances_with([50, 60]), keeps_prefixes=True),
        WorkCostModel(),
        Router(),
    )
    executor = SimulatedExecutor(model, requests, incidents)
    events = KVEvents(CachedBlocks(state.owners, SIZE), put_of(router))
    policy, num_right = make_policy("esp", PolicyConfig()), 0

    async def drain() -> None:
        nonlocal num_right
        scheduling = Scheduling(state, policy, model, executor, (events,))
        async for _ in scheduling.events():
            if not events.num_dropped:
                assert router.blocks == blocks_of(state.owners)
                num_right += bool(router.blocks)
        state.apply(PrefixCacheReset(executor.now))

    asyncio.run(drain())
    return router, num_right


def taking(router: Router) -> Callable[[KVEventBatch], bool]:
    """Return a queue that has always room."""

    def put(batch: KVEventBatch) -> bool:
        sent = msgspec.msgpack.encode(batch)
        router.take(msgspec.msgpack.decode(sent, type=KVEventBatch).events)
        return True

    return put


@pytest.mark.parametrize("seed", range(2))
def test_a_router_that_follows_all_events_knows_the_cached_blocks(seed: int) -> None:
    _, num_right = followed(seed, taking)
    assert num_right > 20


def test_after_a_dropped_batch_the_next_says_all() -> None:
    state = ClusterState(instances_with([50, 60]), keeps_prefixes=True)
    router, has_room = Router(), [True]
    model = WorkCostModel()
    params = SamplingParams(max_tokens=3)
    requests = [Request(f"r{n}", (n,) * 9, params, arrival_time=9.0 * n) for n in range(3)]
    events = KVEvents(CachedBlocks(state.owners, SIZE), lambda b: has_room[0] and taking(router)(b))
    scheduling = Scheduling(
        state, make_policy("esp", PolicyConfig()), model, SimulatedExecutor(model, requests), (events,)
    )

    async def drain() -> None:
        async for event in scheduling.events():
            has_room[0] = not 5.0 < event.time < 15.0

    asyncio.run(drain())
    assert events.num_dropped == 1
    assert router.blocks == blocks_of(state.owners)
    assert len(router.blocks) == 6


def test_batches_go_over_zeromq_in_the_form_of_vllm_and_again_on_demand(tmp_path: Path) -> None:
    endpoints = [f"ipc://{tmp_path}/{name}" for name in ("events", "replay")]
    config = KVEventsConfig(endpoint=endpoints[0], replay_endpoint=endpoints[1], topic="kv", buffer_steps=2)
    publisher, context = KVPublisher(config), zmq.Context()
    stored = BlockStored([2**64 - 1, 5], None, [1, 2, 3, 4], 2)
    batches = [KVEventBatch(1.5, [stored]), KVEventBatch(2.5, [BlockRemoved([5])]), KVEventBatch(3.5, [])]
    try:
        with context.socket(zmq.XSUB) as subscriber, context.socket(zmq.REQ) as client:
            subscriber.connect(endpoints[0])
            subscriber.send(b"\x01kv")
            client.connect(endpoints[1])
            number = -1
            while number < 0:  # until it is subscribed
                assert publisher.put(KVEventBatch(0.0, []))
                if subscriber.poll(20):
                    number = int.from_bytes(subscriber.recv_multipart()[1])
            while subscriber.poll(100):
                number = int.from_bytes(subscriber.recv_multipart()[1])
            for batch in batches:
                publisher.put(batch)
            frames = [subscriber.recv_multipart() for _ in batches]
            assert [f[0] for f in frames] == [b"kv"] * 3
            assert [int.from_bytes(f[1]) for f in frames] == [number + 1, number + 2, number + 3]
            assert msgspec.msgpack.decode(frames[0][2]) == [
                1.5,
                [["BlockStored", [2**64 - 1, 5], None, [1, 2, 3, 4], 2, None, "GPU", None, None]],
            ]
            assert msgspec.msgpack.decode(frames[1][2]) == [2.5, [["BlockRemoved", [5], "GPU"]]]
            client.setsockopt(zmq.REQ_RELAXED, 1)
            client.send((number + 3).to_bytes(8))
            assert client.recv_multipart() == frames[2][1:]
            client.close(0)
            with context.socket(zmq.DEALER) as again:
                again.connect(endpoints[1])
                again.send_multipart((b"", (0).to_bytes(8)))
                replayed = [again.recv_multipart()[1:] for _ in range(3)]
            assert replayed == [*[f[1:] for f in frames[1:]], [END_OF_REPLAY, b""]]
    finally:
        publisher.close()
        context.term()


def test_a_full_queue_refuses_batches_and_waits_for_nobody(tmp_path: Path) -> None:
    publisher = KVPublisher(KVEventsConfig(endpoint=f"ipc://{tmp_path}/events", max_queue_size=1))
    publisher.close()
    assert [publisher.put(KVEventBatch(0.0, [])) for _ in range(2)] == [True, False]


@pytest.mark.parametrize(
    "text", ["[", "3", '{"publishr": "zmq"}', '{"block_size": 0}', '{"publisher": "nats"}']
)
def test_a_wrong_configuration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--kv-events-config"):
        parsed_kv_events(text)


def test_an_address_that_cannot_be_bound_is_named() -> None:
    with pytest.raises(ConfigError, match="tcp://nowhere"):
        KVPublisher(KVEventsConfig(endpoint="tcp://nowhere"))
    assert parsed_kv_events('{"publisher": "null"}').is_on is False
