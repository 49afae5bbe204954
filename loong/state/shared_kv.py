"""KV that several requests hold in the same slots: the choices of one prompt."""

from collections import Counter
from collections.abc import Iterable, Iterator

from loong.core.placement import InstanceId, KVSegment, OwnerId, Placement, tokens_by_instance
from loong.core.positions import difference, intersection
from loong.core.value import value


@value
class SharedPart:
    """Positions on one instance, and their holders: two requests at least."""

    positions: range
    instance_id: InstanceId
    holder_ids: frozenset[OwnerId]


class SharedKV:
    """The shared KV of one prompt's requests. A slot is free once its last holder releases it."""

    def __init__(self, primary_id: OwnerId, placement: Placement, holder_ids: Iterable[OwnerId]) -> None:
        holders = frozenset(holder_ids)
        self.primary_id = primary_id
        self.parts = [SharedPart(s.positions, s.instance_id, holders) for s in placement.segments]

    @property
    def holder_ids(self) -> frozenset[OwnerId]:
        """Return the requests that hold something together with others."""
        return frozenset().union(*(part.holder_ids for part in self.parts))

    def held_by(self, owner_id: OwnerId) -> Placement:
        """Return the KV that a request holds together with others."""
        held = (part for part in self.parts if owner_id in part.holder_ids)
        return Placement(tuple(KVSegment(owner_id, part.positions, part.instance_id) for part in held))

    def let_go(self, owner_id: OwnerId, segments: Iterable[KVSegment]) -> Counter[InstanceId]:
        """Release a request's hold on `segments`; return the slots that stay because others hold them."""
        staying = list[KVSegment]()
        for segment in segments:
            staying += self._let_go(owner_id, segment)
        return tokens_by_instance(staying)

    def lose(self, instance_id: InstanceId) -> None:
        """Forget the KV on an instance."""
        self.parts = [part for part in self.parts if part.instance_id != instance_id]

    @property
    def num_saved(self) -> Counter[InstanceId]:
        """Return the slots that sharing saves on each instance."""
        saved: Counter[InstanceId] = Counter()
        for part in self.parts:
            saved[part.instance_id] += (len(part.holder_ids) - 1) * len(part.positions)
        return saved

    def _let_go(self, owner_id: OwnerId, segment: KVSegment) -> Iterator[KVSegment]:
        parts, self.parts = self.parts, []
        for part in parts:
            common = intersection(part.positions, segment.positions)
            if part.instance_id != segment.instance_id or owner_id not in part.holder_ids or not common:
                self.parts.append(part)
                continue
            yield KVSegment(owner_id, common, part.instance_id)
            rest = difference(part.positions, common)
            self.parts += (SharedPart(positions, part.instance_id, part.holder_ids) for positions in rest)
            holder_ids = part.holder_ids - {owner_id}
            if len(holder_ids) > 1:
                self.parts.append(SharedPart(common, part.instance_id, holder_ids))
