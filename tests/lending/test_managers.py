"""Managers that talk with each other: moves, refusals, loans, and the end of processes."""

import msgspec
import pytest
from lending_world import World

from loong.lending.global_manager import Planning
from loong.lending.greedy import Thresholds
from loong.lending.ledger import LoanReason
from loong.lending.messages import (
    MAX_BLOCKS,
    AskCreditors,
    BlocksStored,
    Creditors,
    Envelope,
    Heartbeat,
    LendingMessageError,
    MoveAllowed,
    MoveKVCache,
    RequestPlacementEntry,
    SendBlocks,
    TryMoveKVCache,
    decoded,
    encoded,
)
from loong.lending.rblocks import Memory, RBlockPool, RoomError
from loong.lending.recent import Recent


class Unhurried:
    """Steps in which reading KV takes much of the time, and any answer hides."""

    def seconds(self, batch_size: int, num_blocks: int, /) -> float:
        return 1.0 + 0.01 * batch_size + num_blocks

    def is_hidden(self, batch_size: int, num_local: int, num_remote: int, /) -> bool:
        return num_remote <= num_local


def world_of(num_engines: int = 3, planning: Planning | None = None, num_host: int = 0) -> World:
    return World(
        {engine: (engine,) for engine in range(num_engines)},
        num_host=num_host,
        planning=planning or Planning(),
    )


def lend(world: World, request_id: str, num_blocks: int, source_id: int, destination_id: int) -> None:
    manager = world.managers[source_id]
    world.send(manager.moves.start(request_id, num_blocks, source_id, destination_id, world.now))
    world.settle()


def test_a_move_leaves_the_newest_block_and_the_ledger_says_who_owes_whom() -> None:
    world = world_of()
    assert world.managers[0].allocate("r", 0, 4)
    lend(world, "r", 9, 0, 1)
    assert world.managers[0].blocks.homes["r"].remote == {0: 1, 1: 1, 2: 1}
    world.check_settled()
    (debt,) = world.global_manager.ledger.debts.values()
    assert (debt.debtor_id, debt.creditor_id, debt.num_blocks, debt.reason) == (0, 1, 3, LoanReason.UNKNOWN)
    world.send(world.managers[0].finish("r", world.now))
    world.settle()
    assert not world.global_manager.entries
    assert not world.global_manager.ledger.debts


def test_room_is_granted_first_come_first_served_and_a_refusal_changes_nothing() -> None:
    world = world_of()
    for engine in (0, 1):
        assert world.managers[engine].allocate(f"r{engine}", engine, 6)
    asked = [
        *world.managers[0].moves.start("r0", 5, 0, 2, 0.0),
        *world.managers[1].moves.start("r1", 5, 1, 2, 0.0),
    ]
    world.send(asked)
    world.settle()
    assert len(world.managers[0].blocks.homes["r0"].remote) == 5
    assert not world.managers[1].blocks.homes["r1"].remote
    assert world.managers[1].moves.num_refused == world.managers[2].promises.num_refused == 1
    world.check_settled()


def test_host_memory_is_lent_after_that_of_the_device_and_not_used_at_home() -> None:
    world = world_of(2, num_host=4)
    assert world.managers[1].allocate("own", 1, 6)
    assert not world.managers[1].allocate("own", 1, 3)
    assert world.managers[0].allocate("r", 0, 6)
    lend(world, "r", 5, 0, 1)
    blocks = world.managers[1].blocks.pools[1].blocks_of("r")
    assert [block.room.memory for block in blocks] == [Memory.DEVICE] * 2 + [Memory.HOST] * 3


def test_a_promise_that_nobody_uses_expires_and_blocks_that_come_too_late_stay() -> None:
    world = world_of(2)
    assert world.managers[0].allocate("r", 0, 4)
    (asked,) = world.managers[0].moves.start("r", 3, 0, 1, world.now)
    (allowed,) = world.managers[1].handle(asked, world.now)
    (sent,) = world.managers[0].handle(allowed, world.now)
    assert isinstance(sent.body, SendBlocks)
    world.now += 3.0
    world.send(world.managers[1].handle(sent, world.now))
    world.settle()
    assert world.managers[1].promises.num_expired == 1
    assert not world.managers[0].blocks.homes["r"].remote
    world.check_settled()


def test_a_debtor_asks_its_creditors_in_turn() -> None:
    """Instance 1 is named first, and has filled up since its last heartbeat."""
    world = world_of(4)
    assert world.managers[0].allocate("long", 0, 7)
    assert world.managers[2].allocate("some", 2, 2)
    assert world.managers[3].allocate("most", 3, 6)
    world.settle()
    assert world.global_manager.creditors_for(0) == (1, 2, 3)
    assert world.managers[1].allocate("sudden", 1, 7)
    world.send(world.managers[0].borrow(0, 3, world.now))
    assert world.managers[0].borrow(0, 3, world.now) == []
    world.settle()
    assert set(world.managers[0].blocks.homes["long"].remote.values()) == {2}
    assert {debt.reason for debt in world.global_manager.ledger.debts.values()} == {LoanReason.FULL}
    assert world.managers[0].borrowings.num_failed == 0
    world.check_settled()


def test_a_search_for_room_ends_where_nobody_has_any_or_nobody_answers() -> None:
    world = world_of(2)
    assert world.managers[0].allocate("long", 0, 7)
    assert world.managers[1].allocate("other", 1, 8)
    world.send(world.managers[0].borrow(0, 3, world.now))
    world.settle()
    assert world.managers[0].borrowings.num_failed == 1
    assert world.managers[0].borrow(0, 3, world.now)  # and the question is lost
    world.settle()
    assert not world.managers[0].borrowings.open
    world.managers[0].lost(None, world.now)
    assert world.managers[0].borrow(0, 3, world.now) == []


def test_a_creditor_that_says_nothing_is_passed_over() -> None:
    world = world_of(3)
    assert world.managers[0].allocate("long", 0, 7)
    world.settle()
    world.send(world.managers[0].borrow(0, 3, world.now))
    while not any(isinstance(envelope.body, TryMoveKVCache) for envelope in world.on_way):
        world.deliver(world.on_way.pop(0))
    world.on_way = []
    world.settle()
    assert set(world.managers[0].blocks.homes["long"].remote.values()) == {2}
    assert world.managers[0].moves.num_given_up == 1


def test_a_creditor_reclaims_its_room_if_the_home_has_room() -> None:
    world = world_of(2)
    assert world.managers[0].allocate("r", 0, 4)
    lend(world, "r", 3, 0, 1)
    world.send(world.managers[1].reclaim(1, 2, world.now))
    world.settle()
    assert world.managers[0].blocks.homes["r"].remote == {2: 1}
    assert world.managers[1].reclaim(1, 0, world.now) == []
    world.check_settled()


def test_blocks_come_back_only_home() -> None:
    world = world_of(3)
    assert world.managers[0].allocate("r", 0, 4)
    lend(world, "r", 3, 0, 1)
    assert world.managers[1].moves.start("r", 1, 1, 2, world.now) == []
    assert world.managers[1].moves.start("r", 1, 1, 1, world.now) == []
    assert world.managers[0].allocate("r", 0, 1)
    assert world.managers[0].moves.start("r", 1, 0, 7, world.now) == []
    assert not world.managers[0].moves.open


def test_a_block_that_has_come_home_does_not_leave_before_its_creditor_knows() -> None:
    world = world_of(2)
    home, creditor = world.managers[0], world.managers[1]
    assert home.allocate("r", 0, 2)
    lend(world, "r", 1, 0, 1)
    (asked,) = creditor.reclaim(1, 1, world.now)
    (sent,) = creditor.handle(home.handle(asked, world.now)[0], world.now)
    (stored,) = home.handle(sent, world.now)  # and this is lost
    assert home.blocks.homes["r"].remote == {}
    (again,) = home.moves.start("r", 1, 0, 1, world.now)
    (blocks,) = home.handle(creditor.handle(again, world.now)[0], world.now)
    (refused,) = creditor.handle(blocks, world.now)
    assert refused.body == BlocksStored(is_stored=False)
    assert home.handle(sent, world.now) == [stored]
    world.send([refused])
    world.settle()
    world.check_settled()
    assert home.blocks.homes["r"].remote == {}


def test_a_gmanagers_order_is_carried_out_once() -> None:
    world = world_of(2)
    assert world.managers[0].allocate("r", 0, 7)
    order = world.global_manager.peers.message(None, 0, 9, MoveKVCache("r", 2, 1))
    world.send(order * 2)
    world.settle()
    assert len(world.managers[0].blocks.homes["r"].remote) == 2


def test_a_new_gmanager_is_told_everything_and_lending_goes_on() -> None:
    world = world_of()
    assert world.managers[0].allocate("r", 0, 4)
    lend(world, "r", 2, 0, 1)
    world.kill_global_manager()
    assert not world.global_manager.entries
    world.settle()
    world.check_settled()
    assert world.global_manager.ledger.blocks == {(0, 1): 2}


def test_what_a_lost_creditor_kept_is_missing_and_computed_again() -> None:
    world = world_of()
    assert world.managers[0].allocate("r", 0, 4)
    lend(world, "r", 3, 0, 1)
    world.kill_engine(1)
    world.settle()
    assert world.managers[0].blocks.homes["r"].missing == {0, 1, 2}
    assert world.managers[0].blocks.restore("r")
    world.settle()
    world.check_settled()
    assert not world.managers[0].blocks.homes["r"].missing


def test_missing_blocks_wait_for_room() -> None:
    world = world_of(2)
    assert world.managers[0].allocate("r", 0, 4)
    lend(world, "r", 3, 0, 1)
    assert world.managers[0].allocate("s", 0, 6)
    world.kill_engine(1)
    world.settle()
    assert not world.managers[0].blocks.restore("r")


def test_what_was_kept_for_a_lost_debtor_is_free() -> None:
    world = world_of()
    assert world.managers[0].allocate("r", 0, 4)
    lend(world, "r", 3, 0, 1)
    world.kill_engine(0)
    world.settle()
    assert world.managers[1].blocks.pools[1].num_free == world.num_device
    world.check_settled()


def test_the_gmanager_swaps_debts_home() -> None:
    world = world_of(2, Planning(least_swap=2))
    for engine in (0, 1):
        assert world.managers[engine].allocate(f"r{engine}", engine, 4)
        lend(world, f"r{engine}", 2 + engine, engine, 1 - engine)
    world.plan()
    world.settle()
    world.check_settled()
    assert world.global_manager.ledger.blocks == {(1, 0): 1}


def test_the_gmanager_proposes_by_algorithm_1_and_the_ledger_says_why() -> None:
    planning = Planning(Unhurried(), Thresholds(4, 0.5), joining_blocks=2)
    world = world_of(2, planning)
    assert world.managers[0].allocate("long", 0, 8)
    world.settle()
    world.plan()
    world.settle()
    world.check_settled()
    (debt,) = world.global_manager.ledger.debts.values()
    assert (debt.debtor_id, debt.creditor_id, debt.reason) == (0, 1, LoanReason.THROUGHPUT)
    world.global_manager = world_of(2, Planning(Unhurried())).global_manager
    assert world.global_manager.plan() == []


def test_frames_beyond_their_bounds_are_refused() -> None:
    entry = RequestPlacementEntry("r", 0, 1, local=True)
    good = Envelope(0, None, 0, 0, 1, Heartbeat((entry,)))
    assert decoded(encoded(good)) == good
    for body in (
        MoveKVCache("r", MAX_BLOCKS + 1, 1),
        MoveKVCache("r" * 257, 1, 1),
        TryMoveKVCache("r", 0),
        SendBlocks("r", ()),
        Heartbeat((entry,) * 5000),
    ):
        with pytest.raises(LendingMessageError, match="is no lending message"):
            decoded(encoded(Envelope(0, 1, 0, 0, 1, body)))
    with pytest.raises(LendingMessageError):
        decoded(msgspec.msgpack.encode([1, 2]))


def test_messages_for_another_or_without_meaning_change_nothing() -> None:
    world = world_of(2)
    manager = world.managers[0]
    assert manager.handle(Envelope(None, 0, 0, 0, 1, AskCreditors(1)), 0.0) == []
    assert manager.handle(Envelope(None, 0, 0, 0, 1, Creditors((1,))), 0.0) == []
    assert manager.handle(Envelope(1, 0, 0, 0, 1, MoveAllowed(True)), 0.0) == []
    assert manager.handle(Envelope(1, 0, 0, 0, 1, MoveKVCache("r", 1, 1)), 0.0) == []
    assert world.global_manager.handle(Envelope(0, None, 0, 0, 1, MoveAllowed(True)), 0.0) == []
    assert world.global_manager.handle(Envelope(9, None, 0, 0, 1, AskCreditors(1)), 0.0) == []


def test_pools_refuse_what_they_do_not_have() -> None:
    pool = RBlockPool(0, 2)
    rooms = pool.reserve(1, may_use_host=True)
    assert rooms is not None
    pool.fill("r", [0], rooms)
    with pytest.raises(RoomError, match=r"is to keep blocks \[0\] of request r"):
        pool.fill("r", [0], rooms)
    with pytest.raises(RoomError, match="instance 0 has no block 1 of request r"):
        pool.free("r", [1])
    manager = world_of(2).managers[0]
    assert manager.allocate("r", 0, 1)
    with pytest.raises(RoomError, match="request r is at home on instance 0, not 1"):
        manager.allocate("r", 1, 1)


def test_what_happened_long_ago_is_forgotten() -> None:
    recent = Recent[str, int](10.0)
    for number, key in enumerate("abac"):
        recent.set(key, number, 4.0 * number)
    assert [recent.get(key) for key in "abcd"] == [2, 1, 3, None]
    recent.set("d", 4, 18.0)
    assert ("a" in recent, "b" in recent, "c" in recent) == (False, False, True)
