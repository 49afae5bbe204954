"""Debtors and creditors: room that an instance with a small batch borrows, so that its batch can grow.

The next step of a debtor reads less KV itself and exchanges queries for the KV that it lent out. A creditor
is slower by what it serves. Both are predicted, and KV moves only if the two produce more tokens in a second.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TypeAlias

from loong.core.cost.cost_model import CostModel
from loong.core.cost.work import StepWork, WorkCount
from loong.core.instance import ESPGroup
from loong.core.placement import InstanceId, KVSegment, Placement
from loong.core.plan import KVMigration
from loong.core.positions import first_of
from loong.core.request import RequestId, RequestView
from loong.scheduler.common.moving_kv import is_movable, moved
from loong.scheduler.common.shares import filled
from loong.scheduler.infinite.admission import Refused
from loong.scheduler.infinite.homes import Home, num_unpromised
from loong.scheduler.tuning import LENT_BLOCK

LENT = "{} tokens of its KV move from instance {} to {}, so that a request that waits finds room"


@dataclass(frozen=True, slots=True)
class Loan:
    """KV that moves to a creditor, or away from it, and the reason."""

    migration: KVMigration
    reason: str


Loans: TypeAlias = Sequence[Loan]


@dataclass(slots=True)
class Lending:
    """The homes that lend and borrow. `waiting` requests have no home; `refused` ones lack room at one.

    KV that a batch makes, which is `ending`, cannot move yet.
    """

    homes: Mapping[InstanceId, Home]
    cost_model: CostModel
    refused: Refused
    waiting: Sequence[RequestView]
    ending_ids: Set[RequestId]

    @property
    def is_moving(self) -> bool:
        """Return whether a round of moves has not ended. Then no other begins."""
        return any(h.view.is_migrating for home in self.homes.values() for h in home.residents)

    @property
    def debtor(self) -> Home | None:
        """Return the home at which the first request that waits lacks room, and is to find it.

        None while what requests that are spread need comes first.
        """
        if self.refused.home is None:
            return None
        is_any_spread = any(other.num_open for other in self.homes.values())
        num_needed = self.refused.views[0].num_final_tokens
        if is_any_spread and num_unpromised(self.homes.values()) < num_needed:
            return None
        return self.refused.home

    def creditors(self) -> Iterator[Home]:
        """Yield those that may lend, which are no debtors. Least memory in use comes first."""
        for home in sorted(self.homes.values(), key=lambda home: (home.num_in_use, home.instance_id)):
            if home is not self.refused.home and not home.is_lent_room:
                yield home

    def is_movable(self, view: RequestView) -> bool:
        """Return whether KV of a request can be copied while its batch runs, so that it does not wait."""
        return is_movable(view, self.ending_ids) and not view.borrowed

    def reclaim(self, creditor: Home, view: RequestView) -> Sequence[KVMigration]:
        """Return moves of KV that a creditor keeps for others, to their homes or to other creditors.

        Nothing moves if that would not make enough room.
        """
        num_lacking, moves = view.num_final_tokens - creditor.group.num_unpromised, list[KVMigration]()
        rooms = {i: home.num_room for i, home in self.homes.items() if home is not creditor}
        for holding in sorted(creditor.hosted, key=lambda h: -h.held[creditor.instance_id]):
            if not self.is_movable(holding.view):
                continue
            others = [home.instance_id for home in self.creditors()]
            preferred = dict.fromkeys((holding.home_id, *others))
            num_held = holding.view.placement.tokens_by_instance().get(creditor.instance_id, 0)
            shares = list(filled(min(num_lacking, num_held), {i: rooms[i] for i in preferred if i in rooms}))
            moves += moved(holding.view, creditor.instance_id, shares)
            for instance_id, num_tokens in shares:
                rooms[instance_id] -= num_tokens
                num_lacking -= num_tokens
        return tuple(moves) if num_lacking <= 0 else ()

    def borrow(self, debtor: Home, view: RequestView) -> Sequence[KVMigration]:
        """Return moves of the oldest KV of its longest requests, as long as each gains.

        Nothing moves if that would not make enough room.
        """
        loan = _Loan(debtor, self.cost_model, self.refused.views)
        creditors = list(self.creditors())
        rooms = {home.instance_id: home.num_room for home in creditors}
        local = {h.view.request_id: h.held[debtor.instance_id] for h in debtor.residents}
        for longest in sorted(debtor.decodes, key=lambda v: -local[v.request_id]):
            for creditor in creditors if self.is_movable(longest) else ():
                if loan.num_room >= view.num_final_tokens:
                    return tuple(loan.moves)
                rooms[creditor.instance_id] -= loan.take(longest, creditor, rooms[creditor.instance_id])
        return tuple(loan.moves) if loan.num_room >= view.num_final_tokens else ()


def make_room(lending: Lending) -> Loans:
    """Return moves that make room for the first request that waits: the rule of `infinite`."""
    home = lending.debtor
    if home is None or lending.is_moving:
        return ()
    view = lending.refused.views[0]
    moves = lending.reclaim(home, view) if home.hosted else lending.borrow(home, view)
    return [Loan(move, LENT.format(len(move.segment.positions), *move.link)) for move in moves]


class _Loan:
    """A loan in the making: `moves`, and `num_room`, the room that they leave at the debtor."""

    def __init__(self, debtor: Home, cost_model: CostModel, waiting: Sequence[RequestView]) -> None:
        self.moves: list[KVMigration] = []
        self.num_room = debtor.group.num_unpromised
        self._debtor, self._cost_model, self._waiting = debtor, cost_model, waiting
        self._placements = {view.request_id: view.placement for view in debtor.decodes}

    def take(self, view: RequestView, creditor: Home, num_room: int) -> int:
        """Add the moves of a request's KV to a creditor that gain most, and return their tokens."""
        segments, creditor_id = self._placements[view.request_id], creditor.instance_id
        ranges = segments.on(self._debtor.instance_id)
        most = min(num_room, sum(map(len, ranges)) - 1) // LENT_BLOCK * LENT_BLOCK
        options = {num_tokens for num_tokens in (most, *self._thresholds()) if 0 < num_tokens <= most}
        chosen: tuple[float, int, Placement, list[KVSegment]] = (self._rate(creditor, 0), 0, segments, [])
        for num_tokens in sorted(options):
            moving = list(oldest(view, ranges, self._debtor.instance_id, num_tokens))
            placement = segments
            for segment in moving:
                placement = placement.moving(segment, creditor_id)
            self._placements[view.request_id] = placement
            if (rate := self._rate(creditor, num_tokens)) > chosen[0]:
                chosen = rate, num_tokens, placement, moving
        _, num_taken, self._placements[view.request_id], moving = chosen
        self.moves += [KVMigration(segment, creditor_id) for segment in moving]
        self.num_room += num_taken
        return num_taken

    def _thresholds(self) -> Iterator[int]:
        """Yield the tokens, in whole blocks, with which one more request finds room.

        Between them the rate is nearly linear, so the best choice is one of them, or the most.
        """
        num_needed = -self.num_room
        for view in self._waiting:
            num_needed += view.num_final_tokens
            yield -(-num_needed // LENT_BLOCK) * LENT_BLOCK

    def _rate(self, creditor: Home, num_more: int) -> float:
        """Return the tokens in a second of debtor and creditor, with this much more room at the debtor.

        A request that finds a part of its room counts as this part.
        """
        joining, num_joining, num_room = list[Placement](), 0.0, self.num_room + num_more
        for view in self._waiting:
            num_tokens = min(num_room, view.num_final_tokens)
            if num_tokens <= 0:
                break
            segment = KVSegment(view.request_id, range(num_tokens), self._debtor.instance_id)
            joining.append(Placement((segment,)))
            num_joining += num_tokens / view.num_final_tokens
            num_room -= num_tokens
        step = _step(self._debtor, (*self._placements.values(), *joining))
        seconds = self._cost_model.step_time(step)
        rate = (len(self._placements) + num_joining) / seconds
        if decodes := creditor.decodes:
            own_seconds = self._cost_model.step_time(_step(creditor, [view.placement for view in decodes]))
            if served := step.holders.get(creditor.instance_id):
                own_seconds += self._cost_model.served_time(served)
            rate += len(decodes) / own_seconds
        return rate


def _step(home: Home, placements: Sequence[Placement]) -> StepWork:
    """Return the work of a decode step of these requests at their home."""
    count = WorkCount((home.instance_id,), is_lease=True)
    for placement in placements:
        count.add_decode(home.instance_id, placement)
    return count.step(ESPGroup((home.instance_id,)), is_first=False)


def oldest(
    view: RequestView, ranges: Sequence[range], instance_id: InstanceId, num_tokens: int
) -> Iterator[KVSegment]:
    """Yield the segments of the lowest `num_tokens` positions of `ranges`, which are on an instance."""
    for positions in first_of(ranges, num_tokens):
        yield KVSegment(view.request_id, positions, instance_id)
