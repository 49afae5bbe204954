from itertools import count
from threading import Thread

import pytest
import torch
from examples import examples
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule
from torch import Tensor

from loong.core.errors import InvalidPlanError
from loong.core.kv_layout import KVLayout, row_of_heads
from loong.worker.kv.pool import KVPool

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 2, 3, 4
NUM_SLOTS = 24

owner_ids = st.sampled_from(["a", "b", "c"])
some_positions = st.builds(
    lambda start, num, step: range(start, start + num * step, step),
    st.integers(0, 30),
    st.integers(0, 9),
    st.integers(1, 4),
)


def make_pool(num_slots: int = NUM_SLOTS, dtype: str = "float32") -> KVPool:
    """Return a pool whose memory is all NaN, so that reading what was never written shows."""
    layout = KVLayout(NUM_LAYERS, row_of_heads(NUM_KV_HEADS, HEAD_DIM), dtype)
    pool = KVPool(layout, num_slots, torch.device("cpu"))
    for layer in range(NUM_LAYERS):
        pool.layer(layer).fill_(torch.nan)
    return pool


def make_kv(tokens: list[int], layer: int) -> Tensor:
    """Return KV [n, 2, K, D] that is different for each token, layer and element."""
    elements = torch.arange(2 * NUM_KV_HEADS * HEAD_DIM).view(2, NUM_KV_HEADS, HEAD_DIM)
    firsts = torch.tensor(tokens, dtype=torch.int64).view(-1, 1, 1, 1) * NUM_LAYERS + layer
    return (firsts * elements.numel() + elements).float()


def store(pool: KVPool, slots: Tensor, tokens: list[int]) -> None:
    pool.scatter(slots, torch.stack([make_kv(tokens, layer) for layer in range(NUM_LAYERS)]))


def assert_holds(pool: KVPool, slots: Tensor, tokens: list[int]) -> None:
    for layer, kv in enumerate(pool.gather(slots)):
        assert torch.equal(kv, make_kv(tokens, layer))


class KVPoolMachine(RuleBasedStateMachine):
    """The pool against a dict: each owner's positions, and the token whose KV is stored there."""

    allocated: Bundle[range] = Bundle("allocated")  # ranges of before, which some owner may hold
    any_positions = st.one_of(allocated, allocated, some_positions)

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool()
        self.tokens: dict[str, dict[int, int]] = {"a": {}, "b": {}, "c": {}}
        self.new_tokens = count()

    def num_used(self) -> int:
        return len({token for held in self.tokens.values() for token in held.values()})

    @rule(target=allocated, owner_id=owner_ids, positions=some_positions)
    def allocate_and_store(self, owner_id: str, positions: range) -> range:
        held = self.tokens[owner_id]
        if len(positions) > NUM_SLOTS - self.num_used() or held.keys() & set(positions):
            with pytest.raises(InvalidPlanError):
                self.pool.allocate(owner_id, positions)
            return positions
        slots = self.pool.allocate(owner_id, positions)
        assert slots.dtype == torch.int64
        held |= {position: next(self.new_tokens) for position in positions}
        store(self.pool, slots, [held[position] for position in positions])
        return positions

    @rule(wanted=st.lists(st.tuples(owner_ids, some_positions), max_size=4))
    def allocate_few_each_and_store(self, wanted: list[tuple[str, range]]) -> None:
        pairs = {(owner_id, p) for owner_id, positions in wanted for p in positions}
        number = sum(len(positions) for _, positions in wanted)
        assume(len(pairs) == number)
        is_taken = any(position in self.tokens[owner_id] for owner_id, position in pairs)
        if number > NUM_SLOTS - self.num_used() or is_taken:
            with pytest.raises(InvalidPlanError):
                self.pool.allocate_few_each(wanted)
            return
        self.pool.allocate_few_each(wanted)
        for owner_id, positions in wanted:
            held = self.tokens[owner_id]
            held |= {position: next(self.new_tokens) for position in positions}
            store(self.pool, self.pool.slots(owner_id, positions), [held[p] for p in positions])

    @rule(owner_id=owner_ids, other_owner_id=owner_ids, positions=any_positions)
    def share(self, owner_id: str, other_owner_id: str, positions: range) -> None:
        held, others = self.tokens[owner_id], self.tokens[other_owner_id]
        if not set(positions) <= held.keys() or others.keys() & set(positions):
            with pytest.raises(InvalidPlanError):
                self.pool.share(owner_id, other_owner_id, positions)
            return
        self.pool.share(owner_id, other_owner_id, positions)
        others |= {position: held[position] for position in positions}

    @rule(owner_id=owner_ids)
    def release(self, owner_id: str) -> None:
        self.pool.release(owner_id)
        self.tokens[owner_id] = {}

    @rule(released=st.lists(st.tuples(owner_ids, any_positions), max_size=3))
    def release_positions(self, released: list[tuple[str, range]]) -> None:
        tokens = [self.tokens[i].get(p) for i, positions in released for p in positions]
        assume(len(set(tokens) - {None}) == len(tokens) - tokens.count(None))
        self.pool.release_positions(released)
        for owner_id, positions in released:
            for position in positions:
                self.tokens[owner_id].pop(position, None)

    @rule(owner_id=owner_ids, positions=any_positions)
    def read(self, owner_id: str, positions: range) -> None:
        held = self.tokens[owner_id]
        if not set(positions) <= held.keys():
            with pytest.raises(InvalidPlanError, match="have no slot"):
                self.pool.slots(owner_id, positions)
            return
        assert_holds(self.pool, self.pool.slots(owner_id, positions), [held[p] for p in positions])

    @rule(wanted=st.lists(st.tuples(owner_ids, some_positions), max_size=4))
    def read_several(self, wanted: list[tuple[str, range]]) -> None:
        out = torch.full((40,), -1)
        if any(not set(positions) <= self.tokens[owner_id].keys() for owner_id, positions in wanted):
            with pytest.raises(InvalidPlanError, match="have no slot"):
                self.pool.list_slots(wanted, out)
            return
        self.pool.list_slots(wanted, out)
        tokens = [self.tokens[owner_id][p] for owner_id, positions in wanted for p in positions]
        assert_holds(self.pool, out[: len(tokens)], tokens)
        assert (out[len(tokens) :] == -1).all()

    @invariant()
    def slots_are_conserved(self) -> None:
        assert self.pool.num_used == self.num_used()
        assert self.pool.num_free + self.pool.num_used == NUM_SLOTS

    @invariant()
    def every_token_has_a_slot_of_its_own_with_its_contents(self) -> None:
        slot_of: dict[int, int] = {}
        for owner_id, held in self.tokens.items():
            for position, token in held.items():
                slots = self.pool.slots(owner_id, range(position, position + 1))
                assert_holds(self.pool, slots, [token])
                assert slot_of.setdefault(token, int(slots)) == int(slots)
        assert len(set(slot_of.values())) == len(slot_of)


KVPoolMachine.TestCase.settings = settings(examples(20, thorough=300), stateful_step_count=25)
TestThePoolBehavesAsADict = KVPoolMachine.TestCase


def test_the_whole_pool_can_be_taken_however_fragmented() -> None:
    pool = make_pool()
    pool.allocate("whole", range(NUM_SLOTS))
    pool.release_positions([("whole", range(1, NUM_SLOTS, 2))])
    pool.allocate("rest", range(NUM_SLOTS // 2))
    assert (pool.num_free, pool.num_used) == (0, NUM_SLOTS)


def test_the_slots_of_a_stripe_come_in_the_order_of_its_positions() -> None:
    pool = make_pool()
    slots = pool.allocate("a", range(1, 41, 4))
    assert torch.equal(pool.slots("a", range(1, 41, 4)), slots)
    assert torch.equal(pool.slots("a", range(5, 41, 8)), slots[1::2])
    assert pool.slots("a", range(0)).shape == (0,)


def test_slots_that_were_given_out_do_not_change_with_the_map() -> None:
    pool = make_pool()
    taken = pool.allocate("a", range(3))
    found = pool.slots("a", range(3))
    pool.release("a")
    assert found.tolist() == taken.tolist()
    assert set(taken.tolist()) <= set(range(NUM_SLOTS))


def test_a_row_is_the_keys_and_values_of_one_token_in_one_layer() -> None:
    pool = make_pool()
    slots = pool.allocate("a", range(2))
    k = torch.ones(2, NUM_KV_HEADS, HEAD_DIM)
    pool.layer(1)[slots] = torch.stack((k, 2 * k), dim=1)
    kv = pool.gather(torch.arange(NUM_SLOTS))
    assert kv.shape == (NUM_LAYERS, NUM_SLOTS, 2, NUM_KV_HEADS, HEAD_DIM)
    assert kv[1, slots].flatten(1).tolist() == [[1.0] * 12 + [2.0] * 12] * 2
    others = torch.ones(NUM_SLOTS, dtype=torch.bool)
    others[slots] = False
    assert kv[1, others].isnan().all()
    assert kv[0].isnan().all()


def test_rows_in_transit_have_the_shape_and_dtype_of_all_layers() -> None:
    rows = make_pool(dtype="bfloat16").empty_rows(5)
    assert rows.shape == (NUM_LAYERS, 5, 2, NUM_KV_HEADS, HEAD_DIM)
    assert rows.dtype == torch.bfloat16


def test_kv_of_another_shape_or_dtype_is_refused() -> None:
    pool = make_pool()
    slots = pool.allocate("a", range(2))
    kv = torch.zeros(NUM_LAYERS, 2, 2, NUM_KV_HEADS, HEAD_DIM)
    for wrong in (kv[1:], kv[:, :1], kv[:, :, :1], kv[:, :, :, :1], kv.double()):
        with pytest.raises((RuntimeError, IndexError, ValueError)):
            pool.scatter(slots, wrong)


def test_errors_name_the_owner_and_both_numbers() -> None:
    pool = make_pool(num_slots=4)
    pool.allocate("a", range(3))
    with pytest.raises(InvalidPlanError, match="b is to store 2 tokens, but 1 slots are free"):
        pool.allocate("b", range(2))
    with pytest.raises(InvalidPlanError, match=r"1 of the 1 positions range\(2, 3\) of a have a slot"):
        pool.allocate("a", range(2, 3))
    with pytest.raises(InvalidPlanError, match=r"2 of the 5 positions range\(0, 5\) of a have no slot"):
        pool.slots("a", range(5))
    with pytest.raises(InvalidPlanError, match=r"1 of the 1 positions range\(0, 1\) of b have no slot"):
        pool.slots("b", range(1))


def test_threads_may_allocate_and_release_at_the_same_time() -> None:
    pool = make_pool(num_slots=4 * 16)

    def come_and_go(owner_id: str) -> None:
        for _ in range(200):
            pool.allocate(owner_id, range(16))
            pool.release(owner_id)
        pool.allocate(owner_id, range(16))

    threads = [Thread(target=come_and_go, args=(f"owner {i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken = torch.cat([pool.slots(f"owner {i}", range(16)) for i in range(4)])
    assert sorted(taken.tolist()) == list(range(4 * 16))
