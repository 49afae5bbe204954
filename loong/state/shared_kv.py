"""KV that several requests hold in the same slots: a prompt's, of which they are the choices."""

from collections import Counter
from collections.abc import Iterable, Iterator

from loong.core.placement import InstanceId, KVSegment, OwnerId, Placement, tokens_by_instance
from loong.core.positions import difference, intersection
from loong.core.value import value


@value
class SharedPart:
    """Positions on one instance, and who holds them: two requests at least."""

    positions: range
    instance_id: InstanceId
    holder_ids: frozenset[OwnerId]


class SharedKV:
    """Which requests of one prompt hold what; a slot is free again when its last holder has let go of it."""

    def __init__(self, primary_id: OwnerId, placement: Placement, holder_ids: Iterable[OwnerId]) -> None:
        holders = frozenset(holder_ids)
        self.primary_id = primary_id
        self.parts = [SharedPart(s.positions, s.instance_id, holders) for s in placement.segments]

    @property
    def holder_ids(self) -> frozenset[OwnerId]:
        """Those who hold something together with others."""
        return frozenset().union(*(part.holder_ids for part in self.parts))

    def held_by(self, owner_id: OwnerId) -> Placement:
        """What a request holds together with others."""
        held = (part for part in self.parts if owner_id in part.holder_ids)
        return Placement(tuple(KVSegment(owner_id, part.positions, part.instance_id) for part in held))

    def let_go(self, owner_id: OwnerId, segments: Iterable[KVSegment]) -> Counter[InstanceId]:
        """Let a request hold `segments` no more; how many of their slots stay, because others hold them."""
        staying = list[KVSegment]()
        for segment in segments:
            staying += self._let_go(owner_id, segment)
        return tokens_by_instance(staying)

    def lose(self, instance_id: InstanceId) -> None:
        """Forget what was on an instance."""
        self.parts = [part for part in self.parts if part.instance_id != instance_id]

    @property
    def num_saved(self) -> Counter[InstanceId]:
        """How many slots more each instance would need if everybody had slots of their own."""
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
