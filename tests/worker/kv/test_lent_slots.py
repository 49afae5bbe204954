"""Slots that a pool lends are in one pool at a time, and come back."""

from itertools import count

import pytest
import torch
from examples import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from loong.core.errors import InvalidPlanError
from loong.core.kv_layout import KVLayout, row_of_heads
from loong.worker.kv.pool import KVPool

NUM_SLOTS = 40
LAYOUT = KVLayout(2, row_of_heads(1, 4), "float32")
CPU = torch.device("cpu")
numbers = st.integers(0, 12)


class Lending(RuleBasedStateMachine):
    """A pool, and pools of slots that it has lent, all of which store numbered tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.pools = {"own": KVPool(LAYOUT, NUM_SLOTS, CPU, is_mapped=True)}
        self.sizes = {"own": NUM_SLOTS}
        self.held: dict[tuple[str, str], tuple[torch.Tensor, int]] = {}
        self.names, self.values = count(), count(1)

    @rule(num_slots=numbers)
    def lend(self, num_slots: int) -> None:
        own, name = self.pools["own"], f"loan {next(self.names)}"
        if num_slots > own.num_free:
            with pytest.raises(InvalidPlanError):
                own.lend(name, num_slots)
            return
        lent = own.lend(name, num_slots)
        self.pools[name] = KVPool(LAYOUT, num_slots, CPU, lent=lent)
        self.sizes[name] = num_slots

    @rule(index=numbers)
    def take_back(self, index: int) -> None:
        if len(self.pools) > 1:
            name = sorted(self.pools.keys() - {"own"})[index % (len(self.pools) - 1)]
            del self.pools[name], self.sizes[name]
            self.held = {key: kept for key, kept in self.held.items() if key[0] != name}
            self.pools["own"].release(name)

    @rule(index=numbers, num_tokens=numbers)
    def store(self, index: int, num_tokens: int) -> None:
        name = sorted(self.pools)[index % len(self.pools)]
        pool, owner_id, value = self.pools[name], f"owner {next(self.names)}", next(self.values)
        if num_tokens > pool.num_free:
            with pytest.raises(InvalidPlanError):
                pool.allocate(owner_id, range(num_tokens))
            return
        slots = pool.allocate(owner_id, range(num_tokens))
        pool.scatter(slots, torch.full((2, num_tokens, *LAYOUT.row_shape), float(value)))
        self.held[name, owner_id] = slots, value

    @rule(index=numbers)
    def release(self, index: int) -> None:
        if self.held:
            name, owner_id = key = sorted(self.held)[index % len(self.held)]
            del self.held[key]
            self.pools[name].release(owner_id)

    @invariant()
    def each_slot_is_in_one_pool_and_keeps_what_was_stored(self) -> None:
        for (name, _), (slots, value) in self.held.items():
            assert (self.pools[name].gather(slots) == value).all()
        lent = sum(size for name, size in self.sizes.items() if name != "own")
        for name, pool in self.pools.items():
            used = sum(len(slots) for (other, _), (slots, _) in self.held.items() if other == name)
            assert pool.num_used == used + (lent if name == "own" else 0)
            assert pool.num_free == self.sizes[name] - pool.num_used


TestLending = Lending.TestCase
TestLending.settings = settings(examples(20, thorough=300), stateful_step_count=30)


def test_memory_of_a_process_that_has_ended_cannot_be_mapped() -> None:
    pool = KVPool(LAYOUT, 4, CPU, is_mapped=True)
    lent = pool.lend("loan", 4)
    del pool
    with pytest.raises(FileNotFoundError):
        KVPool(LAYOUT, 4, CPU, lent=lent)
