"""Slots are handed out once, and so that the KV of a long prompt lies in a row."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from numpy.typing import NDArray

from loong.worker.kv import free_slots
from loong.worker.kv.free_slots import FreeSlots

NUM_SLOTS = 64


class FreeSlotsMachine(RuleBasedStateMachine):
    """Compares free slots with a set."""

    def __init__(self) -> None:
        super().__init__()
        self.slots, self.free = FreeSlots(NUM_SLOTS), set(range(NUM_SLOTS))
        self.taken: list[list[int]] = []

    @rule(number=st.integers(0, 20), goes_on=st.booleans(), expected=st.sampled_from([0, 1 << 20]))
    def take(self, number: int, goes_on: bool, expected: int) -> None:
        number = min(number, len(self.free))
        before = self.taken[-1] if goes_on and self.taken else []
        new = self.slots.take(number, before[-1] if before else None, expected).tolist()
        assert len(new) == len(set(new)) == number
        assert self.free >= set(new)
        self.free -= set(new)
        self.taken.append(new)

    @rule(number=st.integers(0, 20))
    def take_few_each(self, number: int) -> None:
        new = self.slots.take_few_each(min(number, len(self.free))).tolist()
        assert len(new) == len(set(new)) == min(number, len(self.free))
        assert self.free >= set(new)
        self.free -= set(new)

    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        used = sorted(set(range(NUM_SLOTS)) - self.free)
        given = data.draw(st.lists(st.sampled_from(used), unique=True)) if used else []
        self.slots.give(np.array(given, dtype=np.int64))
        self.free |= set(given)

    @invariant()
    def it_knows_how_many_are_free(self) -> None:
        assert len(self.slots) == len(self.free)

    def teardown(self) -> None:
        """All that is free can be had, in a row if it is all."""
        found = self.slots.take(len(self.free), expected=1 << 20).tolist()
        assert set(found) == self.free
        if len(found) == NUM_SLOTS:
            assert found == list(range(NUM_SLOTS))


TestSlotsAreConserved = FreeSlotsMachine.TestCase


def is_row(slots: NDArray[np.int64]) -> bool:
    return bool(np.all(np.diff(slots) == 1))


@pytest.mark.parametrize("num_prompts", [1, 2, 3, 4])
def test_long_prompts_that_come_in_turns_beside_decodes_lie_in_rows_each(num_prompts: int) -> None:
    slots, chunk, num_chunks = FreeSlots(800_000), 750, 100
    prompts = [np.empty(0, dtype=np.int64)] * num_prompts
    for _ in range(num_chunks):
        for number, held in enumerate(prompts):
            last = int(held[-1]) if len(held) else None
            expected = chunk * num_chunks - len(held)
            prompts[number] = np.concatenate((held, slots.take(chunk, last, expected)))
            slots.take(20)
    assert all(map(is_row, prompts))


def test_what_decodes_leave_is_one_row_again_once_they_have_ended() -> None:
    slots = FreeSlots(10_000)
    taken = [slots.take(7) for _ in range(1000)]
    for number in (*range(0, 1000, 3), *range(1, 1000, 3), *range(2, 1000, 3)):
        slots.give(taken[number])
    assert is_row(slots.take(10_000, expected=10_000))


def test_leases_of_many_decodes_do_not_take_the_middle_of_the_longest_run() -> None:
    slots = FreeSlots(100_000)
    prompt = slots.take(5_000, expected=5_000)
    for _ in range(10):
        slots.give(slots.take_few_each(30_000))
    assert is_row(np.concatenate([prompt, slots.take(60_000, int(prompt[-1]))]))


def test_what_is_loose_is_put_back_for_who_needs_a_long_row() -> None:
    slots = FreeSlots(200_000)
    few = slots.take_few_each(200_000)
    for number in np.random.default_rng(0).permutation(2_000):
        slots.give(few[number::2_000])
    assert is_row(slots.take(200_000, expected=200_000))


def test_few_slots_are_found_where_there_is_no_room_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_slots, "_LONG", 8)
    slots = FreeSlots(NUM_SLOTS)
    slots.take(NUM_SLOTS)
    slots.give(np.arange(0, NUM_SLOTS, 2))
    assert sorted(slots.take(NUM_SLOTS // 2, expected=NUM_SLOTS).tolist()) == list(range(0, NUM_SLOTS, 2))
