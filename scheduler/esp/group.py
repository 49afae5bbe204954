"""Groups in the making: instance sets that run one batch, and the prompts that they compute."""

from bisect import bisect_left
from dataclasses import dataclass, field
from operator import attrgetter

from loong.core.placement import InstanceId
from loong.scheduler.common.planning_view import InstanceSet
from loong.scheduler.esp.admission import PrefillCandidate

_rank = attrgetter("rank")


@dataclass(slots=True)
class Group:
    """Instance sets that are to run one batch, and the prompts they compute, most urgent first.

    `spare` is the slots that no request was promised, and `dop` the number of instances. `available_in` is
    the seconds until all are free, and `is_ready` is set if they are now. `num_decodes` counts its decoding
    requests, also in flight, and `longest` is the work of its longest prompt. `work_to` is, for each of its
    prompts, the work of all up to it that are not late.
    """

    instance_sets: list[InstanceSet]
    prefills: list[PrefillCandidate] = field(default_factory=list)
    spare: int = 0
    dop: int = field(init=False)
    available_in: float = field(init=False)
    is_ready: bool = field(init=False)
    num_decodes: int = field(init=False)
    longest: float = field(init=False)
    work_to: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.dop, self.available_in, self.is_ready, self.num_decodes = 0, 0.0, True, 0
        for instance_set in self.instance_sets:
            self.dop += len(instance_set.instance_ids)
            self.available_in = max(self.available_in, instance_set.available_in)
            self.is_ready = self.is_ready and instance_set.is_ready
            self.num_decodes += instance_set.num_decodes
        self.longest, self.work_to = 0.0, []
        if self.prefills:
            self._note_from(0)

    @property
    def instance_ids(self) -> tuple[InstanceId, ...]:
        """Return all its instances, ascending."""
        if len(self.instance_sets) == 1:
            return self.instance_sets[0].instance_ids
        return tuple(sorted(i for instance_set in self.instance_sets for i in instance_set.instance_ids))

    def wait_of(self, prefill: PrefillCandidate) -> float:
        """Return the seconds until it begins a prompt: its present work, and prompts that are due before."""
        place = self._place_of(prefill) if self.prefills else 0
        return self.available_in + self.work_to[place - 1] / self.dop if place else self.available_in

    def add(self, prefill: PrefillCandidate, demand: int) -> None:
        """Add a prompt that is promised `demand` slots."""
        place = self._place_of(prefill)
        self.prefills.insert(place, prefill)
        self.spare -= demand
        self._note_from(place)

    def _place_of(self, prefill: PrefillCandidate) -> int:
        """Return the place of a new prompt: mostly the end, as the most urgent are placed first."""
        if not self.prefills or self.prefills[-1].rank < prefill.rank:
            return len(self.prefills)
        return bisect_left(self.prefills, prefill.rank, key=_rank)

    def _note_from(self, place: int) -> None:
        del self.work_to[place:]
        work = self.work_to[-1] if self.work_to else 0.0
        for prefill in self.prefills[place:]:
            work += 0.0 if prefill.is_deferred else prefill.work
            self.work_to.append(work)
            self.longest = max(self.longest, prefill.work)
