"""Units that are to run one batch, and the prompts that they are to compute."""

from bisect import bisect_left
from dataclasses import dataclass, field
from operator import attrgetter

from loong.scheduler.dispatch import Prefill
from loong.scheduler.survey import Unit

_rank = attrgetter("rank")


@dataclass(slots=True)
class Group:
    """Units that are to run one batch, and the prompts they compute, most urgent first.

    `spare` is the slots that nobody was promised, `dop` the number of instances, `available_in` the seconds
    until all are free, `num_decodes` the decoding requests on it, those in flight too, and `longest` the work
    of its longest prompt. `work_to` is, for each of its prompts, the work of all up to it that are not late.
    """

    units: list[Unit]
    prefills: list[Prefill] = field(default_factory=list)
    spare: int = 0
    dop: int = field(init=False)
    available_in: float = field(init=False)
    num_decodes: int = field(init=False)
    longest: float = field(init=False)
    work_to: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.dop = sum([len(unit.instance_ids) for unit in self.units])
        self.available_in = max([unit.available_in for unit in self.units])
        self.num_decodes = sum([unit.num_decodes for unit in self.units])
        self.longest, self.work_to = 0.0, []
        self._note_from(0)

    @property
    def is_ready(self) -> bool:
        """Whether all its units are."""
        return all(unit.is_ready for unit in self.units)

    def wait_of(self, prefill: Prefill) -> float:
        """Seconds until it begins a prompt: what it does now, and what is due before."""
        num_before = bisect_left(self.prefills, prefill.rank, key=_rank)
        before = self.work_to[num_before - 1] if num_before else 0.0
        return self.available_in + before / self.dop

    def add(self, prefill: Prefill, demand: int) -> None:
        """Take in a prompt that is promised so many slots."""
        place = bisect_left(self.prefills, prefill.rank, key=_rank)
        self.prefills.insert(place, prefill)
        self.spare -= demand
        self._note_from(place)

    def _note_from(self, place: int) -> None:
        del self.work_to[place:]
        work = self.work_to[-1] if self.work_to else 0.0
        for prefill in self.prefills[place:]:
            work += 0.0 if prefill.is_late else prefill.work
            self.work_to.append(work)
            self.longest = max(self.longest, prefill.work)
