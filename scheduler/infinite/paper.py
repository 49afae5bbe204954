"""Infinite-LLM's Algorithm 1 as a policy: `infinite-paper`.

`loong.lending.greedy` is the algorithm. A round begins once the KV of the last one has arrived, whether a
request waits or not. Debtors with room take KV back before anything new is lent, and creditors that lack room
reclaim theirs. The paper gives no values for its thresholds. A debtor's batch is at most that at which
computing tokens takes as long as a step takes for nothing; the share of a creditor's memory is a constant.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

from loong.core.cost.cost_model import CostModel
from loong.core.cost.work import InstanceWork, StepWork
from loong.core.instance import ESPGroup
from loong.core.placement import InstanceId
from loong.core.plan import KVMigration
from loong.lending.greedy import InstanceLoad, Proposal, Thresholds, is_return_better, propose
from loong.scheduler.infinite.homes import Holding, Home
from loong.scheduler.infinite.lending import Lending, Loan, Loans, oldest
from loong.scheduler.tuning import CREDITOR_MEMORY_SHARE, LENT_BLOCK

BORROWED = "instance {} borrows room for {} tokens of its KV from {}: {:.4g} tokens/s become {:.4g}"
RETURNED = "instance {} takes back {} tokens of its KV from {}, since it has room"
RECLAIMED = "{} tokens of its KV move from instance {} to {}, since a request that waits there needs the room"
ALONE, CREDITOR = ESPGroup((0,)), 1


@dataclass(frozen=True, slots=True)
class StepModel:
    """The times of decode steps by the cost model, for equations (5) to (7)."""

    cost_model: CostModel
    known: dict[tuple[int, int], float] = field(default_factory=dict)

    @property
    def debtor_batch(self) -> float:
        """Return the batch size from which a step takes longer in proportion."""
        terms = self.cost_model.prefill_terms(1)
        return terms.least / terms.per_token

    def seconds(self, batch_size: int, num_blocks: int, /) -> float:
        """Return the seconds of a step that reads this many blocks."""
        found = self.known.get((batch_size, num_blocks))
        if found is None:
            found = self.cost_model.step_time(_step(batch_size, num_blocks))
            self.known[batch_size, num_blocks] = found
        return found

    def is_hidden(self, batch_size: int, num_local: int, num_remote: int, /) -> bool:
        """Return whether a step with holders takes no longer for the blocks that a holder reads."""
        steps = (
            replace(
                _step(batch_size, num_local),
                has_exchange=True,
                holders={CREDITOR: InstanceWork(num_sent_queries=1, num_decode_keys=LENT_BLOCK * num_blocks)},
            )
            for num_blocks in (num_remote, 0)
        )
        reading, waiting = map(self.cost_model.step_time, steps)
        return reading <= waiting


def algorithm_1(lending: Lending) -> Loans:
    """Return the moves of one round: those that return KV, or else those of Algorithm 1."""
    if lending.is_moving:
        return ()
    if (home := lending.debtor) is not None and home.hosted:
        moves = lending.reclaim(home, lending.refused.views[0])
        if moves:
            return [Loan(m, RECLAIMED.format(len(m.segment.positions), *m.link)) for m in moves]
    model = StepModel(lending.cost_model)
    loads = {instance_id: _load(home, lending) for instance_id, home in lending.homes.items()}
    if returned := list(_returned(lending, loads, model)):
        return returned
    sizes = [-(-view.num_final_tokens // LENT_BLOCK) for view in lending.waiting if lending.refused.views]
    thresholds = Thresholds(model.debtor_batch, CREDITOR_MEMORY_SHARE)
    return list(_lent(propose(list(loads.values()), sizes, model, thresholds), lending))


def _step(batch_size: int, num_blocks: int) -> StepWork:
    work = InstanceWork(
        num_requests=batch_size,
        num_segments=batch_size,
        num_tokens=batch_size,
        num_attends=batch_size,
        num_decode_keys=LENT_BLOCK * num_blocks,
    )
    return StepWork(ALONE, {0: work}, has_ring=False, has_exchange=False, is_first=False, is_lease=True)


def _load(home: Home, lending: Lending) -> InstanceLoad:
    """Return the load of a home, in blocks."""
    own_id, lent, num_own = home.instance_id, Counter[InstanceId](), 0
    for holding in home.residents:
        num_own += holding.held[own_id]
        lent.update({i: n for i, n in holding.held.items() if i != own_id})
    num_hosted = sum(holding.held[own_id] for holding in home.hosted)
    movable = [holding for holding in home.residents if lending.is_movable(holding.view)]
    longest = max(movable, key=lambda h: (_num_at_home(h), h.view.request_id), default=None)
    return InstanceLoad(
        own_id,
        len(home.residents) + len(home.group.joining),
        (num_own + num_hosted) // LENT_BLOCK,
        home.num_room // LENT_BLOCK,
        home.num_in_use // LENT_BLOCK,
        home.pool // LENT_BLOCK,
        None if longest is None else longest.view.request_id,
        0 if longest is None else max(0, _num_at_home(longest) - 1) // LENT_BLOCK,
        {i: -(-n // LENT_BLOCK) for i, n in lent.items() if n},
        -(-num_hosted // LENT_BLOCK),
    )


def _num_at_home(holding: Holding) -> int:
    return sum(map(len, holding.view.placement.on(holding.home_id)))


def _lent(proposals: Sequence[Proposal], lending: Lending) -> Iterator[Loan]:
    """Yield the moves of proposals: the oldest KV of a request goes to its first creditor."""
    views = {h.view.request_id: h.view for home in lending.homes.values() for h in home.residents}
    placements = {request_id: view.placement for request_id, view in views.items()}
    for found in proposals:
        request_id, num_tokens = found.request_id, found.num_blocks * LENT_BLOCK
        ranges = placements[request_id].on(found.debtor_id)
        for segment in oldest(views[request_id], ranges, found.debtor_id, num_tokens):
            reason = BORROWED.format(
                found.debtor_id, len(segment.positions), found.creditor_id, found.was, found.rate
            )
            placements[request_id] = placements[request_id].moving(segment, found.creditor_id)
            yield Loan(KVMigration(segment, found.creditor_id), reason)


def _returned(lending: Lending, loads: dict[InstanceId, InstanceLoad], model: StepModel) -> Iterator[Loan]:
    """Yield moves home into the room of debtors at which no request lacks it."""
    for home in lending.homes.values():
        if home is lending.refused.home or not home.is_lent_room:
            continue
        num_room = home.num_room // LENT_BLOCK * LENT_BLOCK
        for holding in sorted(home.residents, key=lambda h: h.held[h.home_id] - h.held.total()):
            if not lending.is_movable(holding.view):
                continue
            for creditor_id in sorted(holding.view.placement.instance_ids):
                ranges = sorted(holding.view.placement.on(creditor_id), key=attrgetter("start"))
                num_tokens = min(num_room, sum(map(len, ranges)))
                debtor, creditor = loads[home.instance_id], loads[creditor_id]
                if creditor_id == home.instance_id or not num_tokens:
                    continue
                if not is_return_better(debtor, creditor, -(-num_tokens // LENT_BLOCK), model):
                    continue
                num_room -= num_tokens
                for segment in oldest(holding.view, ranges, creditor_id, num_tokens):
                    reason = RETURNED.format(home.instance_id, len(segment.positions), creditor_id)
                    yield Loan(KVMigration(segment, home.instance_id), reason)
