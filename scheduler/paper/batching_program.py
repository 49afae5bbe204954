"""The exact dynamic program of LoongServe's batching: prefills that run together, and their instances.

LoongServe (SOSP'24), equation (5), for n prefills and m instance sets (instances that must stay together) in
the order given.

C(j, i, h, k) is the cost of prefills j+1 to i as one batch on instance sets h+1 to k:

f[0][k] = 0; f[i][k] = min(f[i][k-1], min over j < i, h < k of f[j][h] + C(j, i, h, k)); answer f[n][m]

The first term leaves instance set k unused, at any place. C is the predicted seconds of the batch times the
weight of all that waits for it, infinite where slots lack.

Computed directly, this takes O(n^2 m^2) steps. But nothing is negative, so the cost that a prefill adds to a
batch only grows with the batch: C(j, i) + C(j', i') <= C(j, i') + C(j', i) for j < j' < i < i', the
quadrangle inequality. Hence on given instance sets the best j never decreases as i grows. Found for every
second i first, it bounds the search for those between. That gives the same optimum in O(m^2 n log n) steps.

Equal prefills need no special case. A program that cuts only between groups of them would not be exact: ten
equal prompts on ten instances may be best as ten batches.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf, sqrt
from operator import attrgetter
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from loong.core.cost.cost_model import PrefillTerms
from loong.scheduler.common.compiled import compiled

Table: TypeAlias = NDArray[np.float64]
Indices: TypeAlias = NDArray[np.int64]


class Demand(NamedTuple):
    """The demand of a prefill of n tokens.

    `num_slots` is the KV room it needs, `num_new_pairs` n^2. `weight` is the cost of a second of its time.
    """

    num_slots: int
    num_tokens: int
    num_new_pairs: int
    weight: float


class Offer(NamedTuple):
    """The offer of an instance set to a batch: instances, free slots, and the cost of using it.

    `delayed_weight` is the cost of a second for requests that wait for the instance set, such as its stopped
    decodes.
    """

    num_instances: int
    num_free: int
    delayed_weight: float = 0.0


class SolvedBatch(NamedTuple):
    """The demands that run together, and the offers that they use."""

    demands: slice
    offers: slice


@dataclass(frozen=True, slots=True)
class Solution:
    """The batches, in order, and the sum of their costs."""

    batches: tuple[SolvedBatch, ...]
    cost: float


def solve(
    demands: Sequence[Demand], offers: Sequence[Offer], terms: Sequence[PrefillTerms]
) -> Solution | None:
    """Cut `demands` into batches, and give each a run of `offers`, in order and at least cost.

    A batch takes `terms[dop - 1].time` of its sums, and costs that times the weights of its demands and
    offers. There is no DoP above `len(terms)`. None if the demands cannot all be met.

    Of solutions with equal cost, the last batch ends at the first possible offer, then has the fewest offers,
    then the most demands. The same holds for the batches before it. Raises `ValueError` for a number that is
    negative, or not finite.
    """
    demand_sums = _prefix_sums(_table("demands", demands, Demand._fields))
    offer_sums = _prefix_sums(_table("offers", offers, Offer._fields))
    coefficients = _table("terms", map(_coefficients_of, terms), _COEFFICIENTS)
    num_demands, num_offers = len(demand_sums) - 1, len(offer_sums) - 1
    costs = np.full((num_offers + 1, num_demands + 1), inf)
    costs[:, 0] = 0.0
    starts = np.zeros((num_offers + 1, num_demands + 1, 2), np.int64)
    cuts = np.empty(2 * num_demands + 1, np.int64)
    _fill(costs, starts, cuts, demand_sums, offer_sums, coefficients)
    cost = float(costs[-1, -1])
    return Solution(_batches(costs, starts), cost) if cost < inf else None


def warm_up() -> None:
    """Compile the program, or load it from the cache, before the first real call."""
    solve([Demand(1, 1, 1, 1.0)], [Offer(1, 1)], [PrefillTerms(0.0, 0.0, 0.0, 0.0, 0.0)])


# Columns of the tables below.
_SLOTS, _TOKENS, _NEW_PAIRS, _WEIGHT = range(4)
_INSTANCES, _FREE, _DELAYED_WEIGHT = range(3)
_OVERHEAD, _LAUNCH, _FLOOR, _PER_PROMPT, _PER_TOKEN, _PER_NEW_PAIR = range(6)

_COEFFICIENTS = ("overhead", "launch", "floor", "per_prompt", "per_token", "per_new_pair")
_coefficients_of = attrgetter(*_COEFFICIENTS)


def _table(name: str, rows: Iterable[Iterable[float]], fields: Sequence[str]) -> Table:
    table = np.fromiter(chain.from_iterable(rows), np.float64).reshape(-1, len(fields))
    if not (table.min(initial=0.0) >= 0.0 and table.max(initial=0.0) < inf):
        row, column = np.argwhere(~((table >= 0.0) & (table < inf)))[0]
        raise ValueError(
            f"{name}[{row}].{fields[column]} must be finite and not negative, but is {table[row, column]}"
        )
    return table


def _prefix_sums(table: Table) -> Table:
    """Return a table whose row i is the sum of the first i rows of `table`."""
    sums = np.zeros((len(table) + 1, table.shape[1]))
    np.cumsum(table, axis=0, out=sums[1:])
    return sums


@compiled
def _fill(
    costs: Table,  # [m + 1, n + 1], f[i][k] at [k, i]
    starts: Indices,  # [m + 1, n + 1, 2], the (h, j) of each f[i][k] that is below f[i][k-1]
    cuts: Indices,  # [2 n + 1], scratch
    demands: Table,  # [n + 1, 4], prefix sums
    offers: Table,  # [m + 1, 3], prefix sums
    terms: Table,  # [largest DoP, 6]
) -> None:
    """Compute f. It loops over single numbers alone, as loops over arrays take seconds to compile."""
    for k in range(1, costs.shape[0]):
        for i in range(costs.shape[1]):
            costs[k, i] = costs[k - 1, i]
        for h in range(k - 1, -1, -1):
            if 1 <= offers[k, _INSTANCES] - offers[h, _INSTANCES] <= len(terms):
                _relax(costs, starts, cuts, demands, offers, terms, h, k)


@compiled
def _relax(
    costs: Table, starts: Indices, cuts: Indices, demands: Table, offers: Table, terms: Table, h: int, k: int
) -> None:
    """Let the last batch of each f[i][k] run on offers h+1 to k, where that is cheaper."""
    num_demands = costs.shape[1] - 1
    last = num_demands
    while costs[h, last] == inf:
        last -= 1
    # The best j of each i. Where i has none, the boundary between the j of smaller i and those of larger i.
    for i in range(len(cuts)):
        cuts[i] = min(i, last)
    step = 1
    while step <= num_demands:
        step *= 2
    while step > 1:
        half = step // 2
        for i in range(half, num_demands + 1, step):
            least = inf
            for j in range(cuts[i - half], min(cuts[i + half], i - 1) + 1):
                cost = costs[h, j] + _batch_cost(demands, offers, terms, j, i, h, k)
                if cost < least:
                    least, cuts[i] = cost, j
            if least < costs[k, i]:
                costs[k, i], starts[k, i, 0], starts[k, i, 1] = least, h, cuts[i]
        step = half


@compiled
def _batch_cost(demands: Table, offers: Table, terms: Table, j: int, i: int, h: int, k: int) -> float:
    """Return C(j, i, h, k)."""
    if demands[i, _SLOTS] - demands[j, _SLOTS] > offers[k, _FREE] - offers[h, _FREE]:
        return inf
    row = int(offers[k, _INSTANCES] - offers[h, _INSTANCES]) - 1
    floor = terms[row, _FLOOR]
    tokens = terms[row, _PER_TOKEN] * (demands[i, _TOKENS] - demands[j, _TOKENS])
    pairs = terms[row, _PER_NEW_PAIR] * (demands[i, _NEW_PAIRS] - demands[j, _NEW_PAIRS])
    computing = max(terms[row, _LAUNCH], sqrt(floor * floor + tokens * tokens) + pairs)
    time = terms[row, _OVERHEAD] + terms[row, _PER_PROMPT] * (i - j) + computing
    weight = demands[i, _WEIGHT] - demands[j, _WEIGHT]
    delayed_weight = offers[k, _DELAYED_WEIGHT] - offers[h, _DELAYED_WEIGHT]
    return float(time * (weight + delayed_weight))


def _batches(costs: Table, starts: Indices) -> tuple[SolvedBatch, ...]:
    """Return the cheapest batches, found from the last to the first."""
    k, i = costs.shape[0] - 1, costs.shape[1] - 1
    batches = []
    while i:
        while costs[k - 1, i] == costs[k, i]:
            k -= 1
        h, j = starts[k, i].tolist()
        batches.append(SolvedBatch(slice(j, i), slice(h, k)))
        k, i = h, j
    return tuple(reversed(batches))
