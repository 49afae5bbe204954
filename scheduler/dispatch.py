"""In which order prompts are computed, and which of them may enter the cluster.

The order keeps as many deadlines as can be kept. Prompts are taken by deadline; when those taken so far
cannot all be in time, the longest of them is put off (Moore and Hodgson 1968: that makes the fewest late on
one machine, and the cluster is nearly one, since a prompt can be cut over its instances). Those put off come
after the others, oldest first, but for a share of every step that is the oldest one's.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from loong.core.cost_model import CostModel, PrefillTerms
from loong.core.instance import InstanceKind
from loong.core.request import SLO, RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.config import PolicyConfig
from loong.scheduler.equations import FutureKV
from loong.scheduler.survey import Survey

SECOND_CHANCE_COST = 4  # a prompt that has missed its deadline counts as so much longer when one is put off
USABLE_SPEED = 0.8  # of the cluster, beside decode and the ends of steps
PATIENCE = 4  # TTFT targets after which a prompt that finds no room is let past by no one any more


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt to be computed: `num_tokens` new ones on `num_cached`.

    `work` is seconds of one instance; `deadline` is when its first token is due, or (`is_missed`) its second
    chance. `is_late` if it was put off.
    """

    view: RequestView
    num_tokens: int
    num_cached: int
    work: float
    deadline: float
    is_missed: bool = False
    is_late: bool = False

    @property
    def is_begun(self) -> bool:
        """Whether some of its KV exists, so that it is bound to instances."""
        return self.num_cached > 0


def dispatch(survey: Survey, cost_model: CostModel, config: PolicyConfig) -> list[Prefill]:
    """The prompts that may be computed now, most urgent first."""
    now, num_instances = survey.snapshot.now, max(1, survey.num_instances)
    terms, widest = cost_model.prefill_terms(1), cost_model.prefill_terms(num_instances)
    prefills = []
    for view in (*survey.waiting, *(v for unit in survey.units for v in unit.prefills)):
        work = prefill_work(view, terms)
        ttft = slo_of(view, widest, config).ttft
        deadline, is_missed = _deadline(view.arrival_time, ttft, now + work / num_instances)
        prefills.append(
            Prefill(view, view.num_uncomputed_tokens, view.num_computed_tokens, work, deadline, is_missed)
        )
    return admitted(in_order(prefills, now, USABLE_SPEED * num_instances), survey, widest, config)


def slo_of(view: RequestView, widest: PrefillTerms, config: PolicyConfig) -> SLO:
    """Its own targets, or else the config's: some times the quickest prefill, never under a least TTFT."""
    if view.slo is not None:
        return view.slo
    num_tokens = view.num_prompt_tokens
    quickest = widest.time(num_tokens, 0, num_tokens * num_tokens)
    return SLO(max(config.target_ttft, config.ttft_factor * quickest), config.target_tpot)


def prefill_work(view: RequestView, terms: PrefillTerms) -> float:
    """Seconds of one instance that the rest of its prompt takes in full steps."""
    num_new, num_cached = view.num_uncomputed_tokens, view.num_computed_tokens
    slope = terms.per_token + terms.per_cached_pair * num_cached + terms.per_new_pair * num_new
    return slope * num_new


def in_order(prefills: Iterable[Prefill], now: float, speed: float) -> list[Prefill]:
    """Those that can be in time by deadline, then those put off by arrival.

    `speed` is the seconds of work that the cluster does in a second.
    """
    by_deadline = sorted(prefills, key=lambda p: (p.deadline, p.view.request_id))
    dearest: list[tuple[float, int]] = []  # a heap of (-cost, index)
    put_off: set[int] = set()
    end = now
    for index, prefill in enumerate(by_deadline):
        cost = prefill.work * (SECOND_CHANCE_COST if prefill.is_missed else 1)
        heappush(dearest, (-cost, index))
        end += prefill.work / speed
        if end > prefill.deadline:
            _, removed = heappop(dearest)
            put_off.add(removed)
            end -= by_deadline[removed].work / speed
    late = sorted((by_deadline[i] for i in put_off), key=lambda p: (p.view.arrival_time, p.view.request_id))
    on_time = [p for i, p in enumerate(by_deadline) if i not in put_off]
    return on_time + [replace(p, is_late=True) for p in late]


def admitted(
    order: Sequence[Prefill], survey: Survey, widest: PrefillTerms, config: PolicyConfig
) -> list[Prefill]:
    """`order` without the prompts that would have to wait for room, now or later.

    What is admitted finds room to its declared end, whatever comes. A prompt that was put off may begin only
    while no other one holds KV; and if one has found no room for long, none that came after it begins.
    """
    snapshot = survey.snapshot
    room = _Room.of(snapshot)
    is_late_begun = any(p.is_late and p.is_begun for p in order)
    last_arrival = float("inf")
    chosen = []
    for prefill in order:
        view = prefill.view
        if prefill.is_begun:
            chosen.append(prefill)
        elif (
            view.arrival_time <= last_arrival and not (prefill.is_late and is_late_begun) and room.fits(view)
        ):
            room.take(view)
            is_late_begun |= prefill.is_late
            chosen.append(prefill)
        elif snapshot.now - view.arrival_time > PATIENCE * slo_of(view, widest, config).ttft:
            last_arrival = min(last_arrival, view.arrival_time)
    return chosen


@dataclass(slots=True)
class _Room:
    """KV of those admitted, to their declared ends: by the sum, which is quick, and if need be exactly."""

    capacity: int
    requests: list[tuple[int, int]]  # remaining and current tokens
    num_declared: int
    future: FutureKV | None = None

    @classmethod
    def of(cls, snapshot: Snapshot) -> "_Room":
        full = [i for i in snapshot.instances if i.kind is InstanceKind.FULL]
        requests = [_future(view) for view in snapshot.running if not view.has_ended]
        return cls(sum(i.kv_capacity for i in full), requests, sum(map(sum, requests)))

    def fits(self, view: RequestView) -> bool:
        remaining, current = _future(view)
        if self.num_declared + remaining + current <= self.capacity:
            return True
        if self.future is None:
            self.future = FutureKV.of(self.requests)
        return self.future.adding(remaining, current).peak <= self.capacity

    def take(self, view: RequestView) -> None:
        remaining, current = _future(view)
        self.requests.append((remaining, current))
        self.num_declared += remaining + current
        if self.future is not None:
            self.future = self.future.adding(remaining, current)


def _future(view: RequestView) -> tuple[int, int]:
    """Output tokens to come whose KV is kept, and all that is known (of which one makes no KV)."""
    return view.num_remaining_tokens - 1, view.num_known_tokens


def _deadline(arrival_time: float, ttft: float, earliest: float) -> tuple[float, bool]:
    """When a first token is due, and whether that is a second chance.

    Once it cannot be in time any more, its target doubles until it can.
    """
    budget = ttft
    while arrival_time + budget < earliest:
        budget *= 2
    return arrival_time + budget, budget > ttft
