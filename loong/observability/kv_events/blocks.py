"""Blocks of cached tokens: the prefix tree as routers know it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from loong.core.instructions import Instruction, ReleaseKV, ShareKV
from loong.core.placement import OwnerId
from loong.observability.kv_events.messages import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from loong.state.owners import KVOwner
from loong.state.prefix_tree import SALT, PrefixTree

MANY = 1000  # owners
_HASH_BYTES = 8


@dataclass(slots=True)
class _Known:
    """The hashes of an owner's blocks from number `first` on, and the numbers of those that are published.

    A block belongs to the owner of its last token.
    """

    first: int
    hashes: list[int] = field(default_factory=list)
    published: set[int] = field(default_factory=set)


class CachedBlocks:
    """Blocks of `block_size` tokens whose KV is cached, and what has changed of them.

    A block stands for all tokens up to its last one. Its hash is made of the hash of the block before it and
    of its own tokens, by BLAKE2b; before the first block comes the salt's digest. A block is cached while
    instances have the KV of all its tokens.
    """

    def __init__(self, tree: PrefixTree, block_size: int) -> None:
        self._tree, self._size = tree, block_size
        self._known: dict[OwnerId, _Known] = {}
        self._changed: dict[OwnerId, range] = {}  # with the positions between which KV changed

    def see(self, instructions: Iterable[Instruction]) -> None:
        """Note the owners whose KV these change."""
        for instruction in instructions:
            match instruction:
                case ShareKV():
                    for segment in instruction.segments:
                        self._change(instruction.user_id, segment.positions)
                case ReleaseKV():
                    self._change(instruction.owner_id, instruction.positions)
                case _:
                    pass

    def see_loss(self) -> None:
        """Note that an instance is lost, so that all owners may have changed."""
        for owner_id in self._known:
            self._change(owner_id, None)

    def news(self) -> list[KVCacheEvent]:
        """Return what has changed since the last call: first blocks that are gone, then new ones."""
        if not self._changed:
            return []
        removed: list[int] = []
        stored: list[BlockStored] = []
        for owner_id in self._touched():
            owner, known = self._tree.by_id.get(owner_id), self._known.get(owner_id)
            held = set() if owner is None else self._held(owner)
            if known is None and not held:
                continue
            before = set[int]() if known is None else known.published
            if known is not None:
                removed += [known.hashes[number - known.first] for number in sorted(before - held)]
            if owner is not None and held:
                stored += self._stored(owner, sorted(held - before))
                self._known[owner_id].published = held
            elif owner is None:
                del self._known[owner_id]
            elif known is not None:
                known.published = held
        self._changed.clear()
        self._forget_owners()
        if removed and not any(known.published for known in self._known.values()):
            return [AllBlocksCleared()]
        return [*([BlockRemoved(removed)] if removed else ()), *stored]

    def all(self) -> list[KVCacheEvent]:
        """Return events that say all, whatever was known before. They cover what has changed."""
        self.news()
        events: list[KVCacheEvent] = [AllBlocksCleared()]
        for owner_id, known in self._known.items():
            if known.published:
                events += self._stored(self._tree.by_id[owner_id], sorted(known.published))
        return events

    def _change(self, owner_id: OwnerId, positions: range | None) -> None:
        if owner_id not in self._known and owner_id not in self._tree.by_id:
            return
        if positions is None or not positions:
            owner = self._tree.by_id.get(owner_id)
            positions = range(0) if owner is None else range(owner.start, owner.stop)
        known = self._changed.get(owner_id, positions)
        first, stop = min(known.start, positions.start), max(known.stop, positions.stop)
        self._changed[owner_id] = range(first, stop)

    def _forget_owners(self) -> None:
        """Forget the hashes of owners that are gone, once they are many."""
        if len(self._known) > MANY + 2 * len(self._tree.by_id):
            self._known = {i: known for i, known in self._known.items() if i in self._tree.by_id}

    def _touched(self) -> list[OwnerId]:
        """Return the owners that have changed, and those whose first block has tokens of them."""
        found = dict(self._changed)
        pending = list(self._changed)
        while pending:
            owner_id = pending.pop()
            owner, positions = self._tree.by_id.get(owner_id), found[owner_id]
            for child in owner.children.values() if owner is not None else ():
                first = child.start - child.start % self._size
                is_met = first < child.start and first < positions.stop and positions.start < child.start
                if is_met and child.owner_id not in found:
                    found[child.owner_id] = positions
                    pending.append(child.owner_id)
        return list(found)

    def _held(self, owner: KVOwner) -> set[int]:
        """Return the numbers of the blocks that end in an owner, and whose KV is all there."""
        if not owner.root.is_kept:  # nobody else reads it
            return set()
        first, stop = owner.start // self._size, owner.stop // self._size
        if first >= stop:
            return set()
        held = _held_tokens(owner)
        offset = first * self._size - owner.start
        before = [_held_at(owner, p) for p in range(first * self._size, owner.start)]
        own = held[max(0, offset) : stop * self._size - owner.start]
        blocks = np.concatenate([np.array(before, dtype=bool), own]).reshape(-1, self._size).all(axis=1)
        return {first + int(number) for number in np.flatnonzero(blocks)}

    def _stored(self, owner: KVOwner, numbers: Sequence[int]) -> Iterator[BlockStored]:
        """Yield events for blocks of an owner, one for those in a row."""
        for _, row in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
            run = [number for _, number in row]
            first, stop = run[0] * self._size, (run[-1] + 1) * self._size
            salt = owner.root.owner_id.removeprefix(SALT)
            is_salted = first == 0 and salt
            yield BlockStored(
                [self._hash(owner, number) for number in run],
                self._hash(owner, run[0] - 1) if first else None,
                _tokens(owner, first, stop).tolist(),
                self._size,
                extra_keys=[(salt,), *([None] * (len(run) - 1))] if is_salted else None,
            )

    def _hash(self, owner: KVOwner, number: int) -> int:
        """Return the hash of a block that ends in an owner, or in one before it."""
        while number < owner.start // self._size:
            assert owner.parent is not None, "roots have no blocks"
            owner = owner.parent
        known = self._known.setdefault(owner.owner_id, _Known(owner.start // self._size))
        while known.first + len(known.hashes) <= number:
            new = known.first + len(known.hashes)
            if known.hashes:
                before = known.hashes[-1].to_bytes(_HASH_BYTES)
            elif new:
                assert owner.parent is not None, "roots have no blocks"
                before = self._hash(owner.parent, new - 1).to_bytes(_HASH_BYTES)
            else:
                before = owner.root.owner_id.encode()
            tokens = _tokens(owner, new * self._size, (new + 1) * self._size).astype("<i4").tobytes()
            digest = blake2b(before + tokens, digest_size=_HASH_BYTES).digest()
            known.hashes.append(int.from_bytes(digest))
        return known.hashes[number - known.first]


def _tokens(owner: KVOwner, first: int, stop: int) -> NDArray[np.int32]:
    """Return some tokens of a sequence that an owner ends."""
    own = owner.token_ids[max(0, first - owner.start) : stop - owner.start]
    if first >= owner.start or owner.parent is None:
        return own
    return np.concatenate([_tokens(owner.parent, first, min(stop, owner.start)), own])


def _held_tokens(owner: KVOwner) -> NDArray[np.bool_]:
    """Return which of its tokens have KV."""
    held = np.zeros(len(owner.token_ids), dtype=bool)
    for _, positions, _ in owner.placement.segments:
        held[positions.start - owner.start : positions.stop - owner.start : positions.step] = True
    return held


def _held_at(owner: KVOwner, position: int) -> bool:
    """Return whether a token before an owner, or of it, has KV."""
    while position < owner.start and owner.parent is not None:
        owner = owner.parent
    return any(position in segment.positions for segment in owner.placement.segments)
