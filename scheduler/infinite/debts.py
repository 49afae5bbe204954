"""DistKV-LLM as a policy: `distkv`. Each instance borrows when it is full, and debts are swapped home.

A home at which a request finds no room asks its candidates in turn until one lends all of it. Those with the
least communication cost come first, and then those with most room. One without that room refuses, and never
borrows for others. The oldest KV of the debtor's longest requests goes there. An instance may be debtor and
creditor at once. Then debts along cycles are swapped home (DGFM). Nothing predicts whether any of this pays.
Host memory is not lent here, since no instance attends over it.
"""

from collections import Counter
from collections.abc import Iterator
from operator import attrgetter

from loong.core.placement import InstanceId
from loong.core.plan import KVMigration
from loong.core.request import RequestId
from loong.lending.cycles import Debts, swaps
from loong.lending.ledger import candidates
from loong.scheduler.infinite.homes import Home
from loong.scheduler.infinite.lending import Lending, Loan, Loans, oldest
from loong.scheduler.tuning import LEAST_SWAP, LENT_BLOCK

BORROWED = "instance {} borrows room for {} tokens of its KV from {}: it is full{}"
REFUSED = "; {} had too little room and came first"
SWAPPED = "instance {} gets {} tokens of its KV back from {}, swapped along a cycle of {} debts"


def borrow_when_full(lending: Lending) -> Loans:
    """Return the moves of a loan for the first request that waits, or else of debts that are swapped home."""
    if lending.is_moving:
        return ()
    return list(_borrowed(lending)) or list(_swapped(lending))


def _borrowed(lending: Lending) -> Iterator[Loan]:
    home = lending.debtor
    if home is None:
        return
    num_lacking = lending.refused.views[0].num_final_tokens - home.group.num_unpromised
    num_tokens = -(-num_lacking // LENT_BLOCK) * LENT_BLOCK
    own_id, shares = home.instance_id, _longest(lending, home, num_tokens)
    if sum(num for _, num in shares) < num_tokens:
        return
    rooms = {i: other.num_room for i, other in lending.homes.items()}

    def cost(creditor_id: InstanceId) -> float:
        return lending.cost_model.migration_time(num_tokens, own_id, creditor_id)

    asked = candidates(own_id, rooms, cost)
    creditor_id = next((i for i in asked if rooms[i] >= num_tokens), None)
    if creditor_id is None:
        return
    refusals = asked[: asked.index(creditor_id)]
    refused = REFUSED.format(", ".join(map(str, refusals))) if refusals else ""
    views = {h.view.request_id: h.view for h in home.residents}
    for request_id, num in shares:
        ranges = views[request_id].placement.on(own_id)
        for segment in oldest(views[request_id], ranges, own_id, num):
            reason = BORROWED.format(own_id, len(segment.positions), creditor_id, refused)
            yield Loan(KVMigration(segment, creditor_id), reason)


def _longest(lending: Lending, home: Home, num_tokens: int) -> list[tuple[RequestId, int]]:
    """Return the tokens of each of the longest requests that make `num_tokens` together, or fewer."""
    local = [
        (sum(map(len, view.placement.on(home.instance_id))) - 1, view.request_id)
        for view in home.decodes
        if lending.is_movable(view)
    ]
    shares = list[tuple[RequestId, int]]()
    for num_local, request_id in sorted(local, key=lambda pair: (-pair[0], pair[1])):
        if (num := min(num_tokens, num_local)) > 0:
            shares.append((request_id, num))
            num_tokens -= num
    return shares


def _swapped(lending: Lending) -> Iterator[Loan]:
    """Yield the moves of swaps, as far as each instance has slots until the others' KV is gone."""
    rooms = {instance_id: home.num_free for instance_id, home in lending.homes.items()}
    for swap in swaps(_debts(lending), LEAST_SWAP):
        num_blocks = min(swap.num_blocks, *[rooms[i] // LENT_BLOCK for i in swap.instance_ids])
        if num_blocks < LEAST_SWAP:
            continue
        for debtor_id, creditor_id in swap.edges:
            rooms[debtor_id] -= num_blocks * LENT_BLOCK
            num_tokens = num_blocks * LENT_BLOCK
            for holding in lending.homes[debtor_id].residents:
                if not lending.is_movable(holding.view):
                    continue
                ranges = sorted(holding.view.placement.on(creditor_id), key=attrgetter("start"))
                for segment in oldest(holding.view, ranges, creditor_id, num_tokens):
                    num_tokens -= len(segment.positions)
                    reason = SWAPPED.format(
                        debtor_id, len(segment.positions), creditor_id, len(swap.instance_ids)
                    )
                    yield Loan(KVMigration(segment, debtor_id), reason)


def _debts(lending: Lending) -> Debts:
    """Return the whole blocks of each debtor at each creditor that can move."""
    tokens: Counter[tuple[InstanceId, InstanceId]] = Counter()
    for home in lending.homes.values():
        for holding in home.residents:
            if lending.is_movable(holding.view):
                for creditor_id, num in holding.view.placement.tokens_by_instance().items():
                    if creditor_id != home.instance_id:
                        tokens[home.instance_id, creditor_id] += num
    return {edge: num // LENT_BLOCK for edge, num in tokens.items()}
