"""Laws of owners of KV, compared with sets of positions and their readers."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from loong.core.placement import KVSegment, Placement, striped
from loong.state.owners import KVOwner, KVOwners

NUM_TOKENS, INSTANCES, USERS = 12, (0, 1, 2), ("a", "b", "c")
numbers = st.integers(0, NUM_TOKENS)
ranges = st.builds(range, numbers, numbers, st.integers(1, 4)).filter(len)
users, instance_ids = st.sampled_from(USERS), st.sampled_from(INSTANCES)


def slots(placement: Placement) -> list[tuple[int, int]]:
    """Return the positions of KV, with their instances."""
    return sorted((p, segment.instance_id) for segment in placement.segments for p in segment.positions)


class OwnerMachine(RuleBasedStateMachine):
    """One owner, whose users read prefixes of it and give back what they like, while instances are lost."""

    @initialize(lengths=st.tuples(st.just(NUM_TOKENS), numbers, numbers))
    def lend(self, lengths: tuple[int, ...]) -> None:
        self.owner = KVOwner("kv", striped("r", range(NUM_TOKENS), INSTANCES))
        for user_id, length in zip(USERS, lengths, strict=True):
            self.owner.lend(user_id, (range(length),))
        self.readers = {
            (p, i): {user_id for user_id, length in zip(USERS, lengths, strict=True) if p < length}
            for p, i in slots(self.owner.placement)
        }

    @rule(user_id=users, given_back=st.lists(st.tuples(ranges, instance_ids), max_size=3))
    def give_back(self, user_id: str, given_back: list[tuple[range, int]]) -> None:
        staying: Counter[int] = Counter()
        for positions, instance_id in given_back:
            for readers in (self.readers.get((p, instance_id), set()) for p in positions):
                staying[instance_id] += len(readers) > 1 and user_id in readers
                readers.discard(user_id)
        segments = [KVSegment(user_id, positions, instance_id) for positions, instance_id in given_back]
        assert +self.owner.give_back(user_id, segments) == +staying

    @rule(instance_id=instance_ids)
    def lose(self, instance_id: int) -> None:
        self.owner.lose(instance_id)
        self.readers = {slot: readers for slot, readers in self.readers.items() if slot[1] != instance_id}

    @invariant()
    def has_just_what_somebody_reads(self) -> None:
        assert slots(self.owner.placement) == sorted(
            slot for slot, readers in self.readers.items() if readers
        )
        for user_id in USERS:
            read = {slot: readers for slot, readers in self.readers.items() if user_id in readers}
            assert slots(self.owner.read_by(user_id)) == sorted(read)
            shared = (slot for slot, readers in read.items() if len(readers) > 1)
            assert slots(self.owner.shared_with(user_id)) == sorted(shared)


TestOwners = OwnerMachine.TestCase


def family(owners: KVOwners) -> KVOwner:
    owner = owners.make(striped("r", range(NUM_TOKENS), INSTANCES))
    for user_id in USERS:
        owner.lend(user_id, (range(NUM_TOKENS),))
    return owner


@given(st.permutations(USERS))
def test_kv_that_all_its_users_have_left_has_no_owner(leaving: list[str]) -> None:
    owners = KVOwners()
    owner, free = family(owners), Counter[int]()
    for user_id in leaving:
        assert owners.by_id == {owner.owner_id: owner}
        released = owner.read_by(user_id)
        free.update(released.tokens_by_instance())
        free.subtract(owner.give_back(user_id, released.segments))
        owners.leave(user_id, (owner,))
    assert owners.by_id == {}
    assert free == {i: NUM_TOKENS // len(INSTANCES) for i in INSTANCES}


def test_kv_on_a_lost_instance_is_missing_for_all_users_of_all_owners() -> None:
    owners = KVOwners()
    both = family(owners), family(owners)
    owners.lose(1)
    assert len(owners.by_id) == 2
    for owner in both:
        for user_id in USERS:
            assert owner.read_by(user_id).tokens_by_instance() == {0: 4, 2: 4}
            assert owner.read_by(user_id).first_missing == 1
