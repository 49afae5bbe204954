"""Laws of the tree of owners, compared with all prefixes of the sequences that it has seen."""

from itertools import count

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loong.core.instance import ElasticInstance, InstanceKind
from loong.core.placement import InstanceId, KVSegment
from loong.state.owners import KVOwner
from loong.state.pool_ledger import PoolLedger
from loong.state.prefix_tree import Path, PrefixTree, parts_within

CAPACITY = 1000
INSTANCES = (0, 1, 2)
salts = st.sampled_from("xy")
sequences = st.lists(st.integers(0, 1), min_size=1, max_size=12).map(tuple)
Tokens = tuple[int, ...]


def new_tree(*, keeps: bool = True) -> tuple[PoolLedger, PrefixTree]:
    pools = PoolLedger()
    for instance_id in INSTANCES:
        pools.join(ElasticInstance(instance_id, 1, InstanceKind.FULL, CAPACITY))
    return pools, PrefixTree(pools, keeps=keeps)


def path_in(tree: PrefixTree, salt: str, tokens: Tokens) -> Path:
    return tree.path(salt, np.array(tokens, dtype=np.int32))


def owners_of(path: Path) -> list[KVOwner]:
    """Return the owner of each position of a path. Raises if they are not those from 0 on."""
    assert [p for _, positions in path for p in positions] == [*range(path[-1].positions.stop)]
    return [owner for owner, positions in path for _ in positions]


def tokens_of(path: Path) -> Tokens:
    """Return the tokens that its owners have at its positions."""
    return tuple(int(owner.token_ids[p - owner.start]) for owner, positions in path for p in positions)


def num_equal(one: Tokens, other: Tokens) -> int:
    """Return the length of the longest common prefix."""
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


@given(st.lists(sequences, min_size=1, max_size=8), st.integers(0, 12))
def test_a_path_that_goes_on_after_a_known_one_is_that_of_all_tokens(found: list[Tokens], cut: int) -> None:
    _, tree = new_tree()
    before = {tokens: path_in(tree, "x", tokens[:cut]) for tokens in found}
    for tokens, known in before.items():
        whole = tree.path("x", np.array(tokens, dtype=np.int32), known=known)
        assert tokens_of(whole) == tokens
        assert whole == path_in(tree, "x", tokens)


@given(st.lists(st.tuples(salts, sequences), min_size=1, max_size=12))
def test_sequences_have_the_same_owners_just_where_they_begin_alike(found: list[tuple[str, Tokens]]) -> None:
    _, tree = new_tree()
    paths = [(salt, tokens, path_in(tree, salt, tokens)) for salt, tokens in found]
    for salt, tokens, path in paths:
        assert tokens_of(path) == tokens
        assert path_in(tree, salt, tokens) == path
        for other_salt, other_tokens, other_path in paths:
            num_shared = num_equal(tokens, other_tokens) if salt == other_salt else 0
            both = zip(owners_of(path), owners_of(other_path), strict=False)
            assert [a is b for a, b in both] == [
                i < num_shared for i in range(min(len(tokens), len(other_tokens)))
            ]


@given(st.lists(st.tuples(salts, sequences), min_size=1, max_size=12), st.data())
def test_owners_without_kv_go_with_the_last_request_that_has_their_tokens(
    found: list[tuple[str, Tokens]], data: st.DataObject
) -> None:
    _, tree = new_tree()
    paths = {f"r{i}": path_in(tree, salt, tokens) for i, (salt, tokens) in enumerate(found)}
    for request_id, path in paths.items():
        tree.follow(request_id, path)
    for request_id in data.draw(st.permutations(list(paths))):
        tree.unfollow(request_id, paths.pop(request_id))
        named = {owner.owner_id for path in paths.values() for owner, _ in path}
        before = {owner.parent.owner_id for owner in tree.by_id.values() if owner.parent is not None}
        assert named <= tree.by_id.keys() <= named | before
    assert is_empty(tree)


def test_kv_of_an_earlier_use_can_be_evicted_where_the_last_use_had_none() -> None:
    pools, tree = new_tree()
    whole = path_in(tree, "x", (0,) * 12)
    (owner, _), *_ = whole
    tree.follow("r", whole)
    pools.reserve({0: 4, 1: 8})
    tree.give(owner, "r", [KVSegment("r", range(4), 0), KVSegment("r", range(4, 12), 1)])
    tree.touch(whole)
    tree.leave(owner, "r")
    tree.touch(path_in(tree, "x", (0,) * 4))
    pools.reserve({0: CAPACITY - 3})
    tree.make_room()
    pools.release({0: CAPACITY - 3})
    assert pools.instances[0].kv_cached == 3
    tree.touch(whole)
    tree.empty(0)
    assert pools.instances[0].kv_cached == 0


def is_empty(tree: PrefixTree) -> bool:
    """Return whether it has nothing at all."""
    return not any((tree.by_id, tree.roots, tree._order))  # a leak shows nowhere else


class TreeMachine(RuleBasedStateMachine):
    """Requests begin, read what is there, end, and their KV goes in the order of its last use.

    `last_use` has the time of each token's KV that stays: its salt, and the tokens up to it. Of one sequence,
    what follows goes before what it begins with.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pools, self.tree = new_tree()
        self.at: dict[tuple[str, Tokens], InstanceId] = {}
        self.last_use: dict[tuple[str, Tokens], int] = {}
        self.requests: dict[str, tuple[str, Tokens, Path, tuple[KVSegment, ...]]] = {}
        self.clock, self.numbers = count(), count()

    @rule(salt=salts, tokens=sequences, cut=st.integers(0, 12), instance_ids=st.permutations(INSTANCES))
    def begin(self, salt: str, tokens: Tokens, cut: int, instance_ids: list[InstanceId]) -> None:
        """Read what others have, and compute the rest on two instances: it stays for others."""
        request_id, path = f"r{next(self.numbers)}", path_in(self.tree, salt, tokens)
        self.tree.follow(request_id, path)
        for owner, positions in path:
            found = [
                segment._replace(positions=part)
                for segment in owner.placement.segments
                for part in [range(p, p + 1) for p in segment.positions if p in positions]
            ]
            if found:
                self.tree.lend(owner, request_id, found)
        known = {self.prefix(salt, tokens, p): p for p in range(len(tokens))}
        first, second = min(cut, len(tokens)), (cut + len(tokens)) // 2
        homes = [instance_ids[0 if p < first or p > second else 1] for p in range(len(tokens))]
        computed = [
            KVSegment(request_id, range(p, p + 1), homes[p])
            for prefix, p in known.items()
            if prefix not in self.at
        ]
        self.pools.reserve({i: sum(s.instance_id == i for s in computed) for i in INSTANCES})
        for owner, within in parts_within(path, computed):
            self.tree.give(owner, request_id, within)
        self.at.update({self.prefix(salt, tokens, s.positions[0]): s.instance_id for s in computed})
        segments = tuple(
            KVSegment(request_id, range(p, p + 1), self.at[prefix]) for prefix, p in known.items()
        )
        self.requests[request_id] = salt, tokens, path, segments

    def prefix(self, salt: str, tokens: Tokens, position: int) -> tuple[str, Tokens]:
        return salt, tokens[: position + 1]

    @precondition(lambda self: self.requests)
    @rule(index=st.integers(0, 20))
    def end(self, index: int) -> None:
        request_id = sorted(self.requests)[index % len(self.requests)]
        salt, tokens, path, segments = self.requests.pop(request_id)
        self.tree.touch(path)
        num_ended = 0
        for owner in [owner for owner, _ in path if request_id in owner.users]:
            if index % 2:  # at once, or first some and then the rest
                num_ended += sum(self.tree.end_use(owner, request_id, segments[::2]).values())
            num_ended += self.tree.leave(owner, request_id).num_tokens
        assert num_ended == len(segments)
        self.tree.unfollow(request_id, path)
        time = next(self.clock)
        self.last_use.update({self.prefix(salt, tokens, p): time for p in range(len(tokens))})

    @rule(instance_id=st.sampled_from(INSTANCES), num_tokens=st.integers(1, 8))
    def need_room(self, instance_id: InstanceId, num_tokens: int) -> None:
        """Use all room but that of the KV that may stay, and evict the rest."""
        instance = self.pools.instances[instance_id]
        num_evicted = min(num_tokens, instance.kv_cached)
        num_used = instance.kv_free - instance.kv_cached + num_evicted
        self.pools.reserve({instance_id: num_used})
        expected = self.next_to_go(instance_id)[:num_evicted]
        self.tree.make_room()
        for prefix in expected:
            del self.at[prefix]
        self.pools.release({instance_id: num_used})

    @rule(instance_id=st.sampled_from(INSTANCES))
    def empty(self, instance_id: InstanceId) -> None:
        """Evict all that nobody reads there."""
        for prefix in self.next_to_go(instance_id):
            del self.at[prefix]
        self.tree.empty(instance_id)

    @rule(instance_id=st.sampled_from(INSTANCES))
    def lose(self, instance_id: InstanceId) -> None:
        """Lose an instance, and have another in its place."""
        self.tree.lose(instance_id)
        self.pools.lose(instance_id, returns=False)
        self.pools.join(ElasticInstance(instance_id, 1, InstanceKind.FULL, CAPACITY))
        self.at = {prefix: i for prefix, i in self.at.items() if i != instance_id}
        for request_id, (salt, tokens, path, segments) in self.requests.items():
            staying = tuple(s for s in segments if s.instance_id != instance_id)
            self.requests[request_id] = salt, tokens, path, staying

    def next_to_go(self, instance_id: InstanceId) -> list[tuple[str, Tokens]]:
        """Return what nobody reads on an instance, in the order in which it is to go."""
        read = {
            self.prefix(salt, tokens, s.positions[0])
            for salt, tokens, _, segments in self.requests.values()
            for s in segments
        }
        unread = [prefix for prefix, i in self.at.items() if i == instance_id and prefix not in read]
        return sorted(unread, key=lambda prefix: (self.last_use[prefix], -len(prefix[1]), prefix))

    @invariant()
    def has_just_what_stays(self) -> None:
        self.tree.take_instructions()
        found: dict[tuple[str, Tokens], InstanceId] = {}
        for owner in self.tree.by_id.values():
            salt, before = prefix_before(owner)
            for segment in owner.placement.segments:
                for p in segment.positions:
                    tokens = (*before, *map(int, owner.token_ids[: p - owner.start + 1]))
                    found[salt, tokens] = segment.instance_id
        assert found == self.at
        for instance_id, instance in self.pools.instances.items():
            unread = len(self.next_to_go(instance_id))
            held = sum(i == instance_id for i in self.at.values())
            assert (instance.kv_used, instance.kv_cached) == (held - unread, unread)

    def teardown(self) -> None:
        """Check that nothing is left once all have ended, and all is evicted."""
        while self.requests:
            self.end(0)
        for instance_id in INSTANCES:
            self.tree.empty(instance_id)
        assert all(i.kv_used == i.kv_cached == 0 for i in self.pools.instances.values())
        assert is_empty(self.tree)


def prefix_before(owner: KVOwner) -> tuple[str, Tokens]:
    """Return the salt of an owner, and the tokens before its first position."""
    tokens: Tokens = ()
    while (parent := owner.parent) is not None:
        tokens = (*map(int, parent.token_ids[: owner.start - parent.start]), *tokens)
        owner = parent
    return owner.owner_id, tokens


TestTree = TreeMachine.TestCase
