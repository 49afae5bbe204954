"""Laws of owners of KV, compared with sets of positions and their readers."""

from collections import Counter
from itertools import count

import numpy as np
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from loong.core.placement import KVSegment, Placement, striped
from loong.core.positions import num_below
from loong.state.owners import KVOwner

NUM_TOKENS, INSTANCES, USERS = 12, (0, 1, 2), ("a", "b", "c")
numbers = st.integers(0, NUM_TOKENS)
ranges = st.builds(range, numbers, numbers, st.integers(1, 4)).filter(len)
users, instance_ids = st.sampled_from(USERS), st.sampled_from(INSTANCES)


def slots(placement: Placement) -> list[tuple[int, int]]:
    """Return the positions of KV, with their instances."""
    return sorted((p, segment.instance_id) for segment in placement.segments for p in segment.positions)


def new_owner(num_tokens: int = NUM_TOKENS) -> KVOwner:
    return KVOwner("kv", 0, np.arange(num_tokens, dtype=np.int32))


class OwnerMachine(RuleBasedStateMachine):
    """One owner, whose users read parts of it and give back what they like; KV comes, goes and is lost."""

    @initialize(lengths=st.tuples(st.just(NUM_TOKENS), numbers, numbers))
    def begin(self, lengths: tuple[int, ...]) -> None:
        self.owner = new_owner()
        all_kv = striped("r", range(NUM_TOKENS), INSTANCES)
        self.owner.add(all_kv.segments)
        for user_id, length in zip(USERS, lengths, strict=True):
            self.owner.lend(
                user_id,
                [
                    s._replace(positions=p)
                    for s in all_kv.segments
                    if (p := s.positions[: num_below((s.positions,), length)])
                ],
            )
        self.readers: dict[tuple[int, int], set[str | int]] = {
            (p, i): {user_id for user_id, length in zip(USERS, lengths, strict=True) if p < length}
            for p, i in slots(self.owner.placement)
        }
        self.numbers = count()

    @rule(user_id=users, positions=ranges, instance_id=instance_ids)
    def lend(self, user_id: str, positions: range, instance_id: int) -> None:
        """Lend those that are there and that the user does not read, there or elsewhere."""
        read = {p for (p, _), readers in self.readers.items() if user_id in readers}
        new = [p for p in positions if (p, instance_id) in self.readers and p not in read]
        self.owner.lend(user_id, [KVSegment("r", range(p, p + 1), instance_id) for p in new])
        for position in new:
            self.readers[position, instance_id].add(user_id)

    @rule(positions=ranges, instance_id=instance_ids)
    def add(self, positions: range, instance_id: int) -> None:
        """Add those that are not there."""
        new = [p for p in positions if (p, instance_id) not in self.readers]
        self.owner.add([KVSegment("r", range(p, p + 1), instance_id) for p in new])
        self.readers.update({(p, instance_id): set() for p in new})

    @rule(positions=ranges, instance_id=instance_ids)
    def pin(self, positions: range, instance_id: int) -> None:
        """Begin a migration of those that are there."""
        there = [p for p in positions if (p, instance_id) in self.readers]
        for position in there[:1]:
            number = next(self.numbers)
            self.owner.pin(number, KVSegment("kv", range(position, position + 1), instance_id))
            self.readers[position, instance_id].add(number)

    @precondition(lambda self: self.owner.pinned)
    @rule()
    def unpin(self) -> None:
        number = min(self.owner.pinned)
        self.owner.unpin(number)
        for readers in self.readers.values():
            readers.discard(number)

    @rule(positions=ranges, instance_id=instance_ids)
    def retire(self, positions: range, instance_id: int) -> None:
        """Retire those that stay elsewhere."""
        for position in positions:
            segment = KVSegment("kv", range(position, position + 1), instance_id)
            if (position, instance_id) in self.readers and self.owner.elsewhere(segment):
                self.owner.retire(segment)

    @rule(positions=ranges)
    def remove(self, positions: range) -> None:
        """Drop those of them that nobody reads."""
        for slot in [slot for slot, readers in self.readers.items() if not readers and slot[0] in positions]:
            self.owner.remove(KVSegment("kv", range(slot[0], slot[0] + 1), slot[1]))
            del self.readers[slot]

    @rule(user_id=users, given_back=st.lists(st.tuples(ranges, instance_ids), max_size=3))
    def give_back(self, user_id: str, given_back: list[tuple[range, int]]) -> None:
        ended: Counter[int] = Counter()
        for positions, instance_id in given_back:
            for readers in (self.readers.get((p, instance_id), set()) for p in positions):
                ended[instance_id] += user_id in readers
                readers.discard(user_id)
        segments = [KVSegment(user_id, positions, instance_id) for positions, instance_id in given_back]
        assert +self.owner.give_back(user_id, segments) == +ended

    @rule(user_id=users)
    def leave_and_return(self, user_id: str) -> None:
        self.owner.leave(user_id)
        assert user_id not in self.owner.users
        self.owner.lend(user_id, ())
        for readers in self.readers.values():
            readers.discard(user_id)

    @rule(instance_id=instance_ids)
    def lose(self, instance_id: int) -> None:
        for number in [n for n, pinned in self.owner.pinned.items() if pinned.instance_id == instance_id]:
            self.owner.unpin(number)
        self.owner.lose(instance_id)
        self.readers = {slot: readers for slot, readers in self.readers.items() if slot[1] != instance_id}

    @invariant()
    def knows_what_it_has_and_who_reads_it(self) -> None:
        assert slots(self.owner.placement) == sorted(self.readers)
        unread = [slot for slot, readers in self.readers.items() if not readers]
        assert slots(self.owner.unread) == sorted(unread)
        assert self.owner.num_unread_tokens() == Counter(i for _, i in unread)
        for user_id in USERS:
            read = {slot: readers for slot, readers in self.readers.items() if user_id in readers}
            assert slots(self.owner.read_by(user_id)) == sorted(read)
            shared = (slot for slot, readers in read.items() if len(readers) > 1)
            assert slots(self.owner.shared_with(user_id)) == sorted(shared)
            placements = self.owner.read_by(user_id), self.owner.shared_with(user_id)
            assert {s.owner_id for placement in placements for s in placement.segments} <= {user_id}
        places = Counter(p for p, _ in self.readers)
        assert self.owner.has_copies == (max(places.values(), default=0) > 1)
        retired = {*slots(self.owner.retired)}
        assert retired <= self.readers.keys()
        assert {p for p, _ in retired} <= {p for p, _ in self.readers.keys() - retired}


TestOwners = OwnerMachine.TestCase


@given(st.permutations(USERS))
def test_kv_that_all_its_users_have_left_is_unread(leaving: list[str]) -> None:
    owner = new_owner()
    owner.add(striped("r", range(NUM_TOKENS), INSTANCES).segments)
    for user_id in USERS:
        owner.lend(user_id, owner.placement.segments)
    for user_id in leaving:
        assert not owner.unread.segments
        read = owner.read_by(user_id)
        assert owner.give_back(user_id, ()) == Counter()
        assert owner.leave(user_id) == read
    assert owner.users == {}
    assert owner.unread == owner.placement


@examples(6, thorough=120)
@given(st.sampled_from((0, 1, 4095, 4096, 4097, 9000)), st.integers(0, 9000), st.integers(0, 5))
def test_tokens_match_up_to_the_first_that_differs(num_equal: int, num_more: int, start: int) -> None:
    own = np.arange(9000, dtype=np.int32)
    owner = KVOwner("kv", start, own)
    first = start + 3
    same = [*own[3 : 3 + num_equal].tolist()]
    sequence = np.array([0] * first + same + [-1] * num_more, dtype=np.int32)
    assert owner.num_matching(sequence, first) == min(num_equal, 9000 - 3)
    assert owner.num_matching(sequence[: first + len(same)], first) == len(same)
