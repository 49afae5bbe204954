"""Shares of some tokens, one for each of several instances."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TypeAlias

from loong.core.placement import InstanceId, KVSegment, OwnerId
from loong.core.positions import cut

Share: TypeAlias = tuple[InstanceId, int]
"""A number of tokens of KV on an instance."""


def filled(num_tokens: int, rooms: Mapping[InstanceId, int]) -> Iterator[Share]:
    """Yield the instances that take `num_tokens`, or as many as have room, one filled after the other."""
    for instance_id, num_room in rooms.items():
        if num_taken := min(num_room, num_tokens):
            yield instance_id, num_taken
        num_tokens -= num_taken


def leveled(num_tokens: int, rooms: Mapping[InstanceId, int]) -> Iterator[Share]:
    """Yield equal shares of `num_tokens`, or as many as have room; where one has less, others take more."""
    by_room = sorted(rooms, key=lambda i: (rooms[i], i))
    for number, instance_id in enumerate(by_room):
        fair = -(-num_tokens // (len(by_room) - number))
        if num_taken := min(rooms[instance_id], fair):
            yield instance_id, num_taken
        num_tokens -= num_taken


def dealt_out(owner_id: OwnerId, ranges: Sequence[range], shares: Sequence[Share]) -> Iterator[KVSegment]:
    """Yield the segments of the lowest positions of ascending `ranges`, for each share in turn."""
    bounds = accumulate((num_tokens for _, num_tokens in shares), initial=0)
    for (instance_id, _), pieces in zip(shares, cut(ranges, bounds), strict=True):
        for positions in pieces:
            yield KVSegment(owner_id, positions, instance_id)
