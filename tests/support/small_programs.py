"""Programs for the batching tests, and their least cost by definition."""

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from math import inf
from random import Random
from typing import NamedTuple

from loong.core.cost.cost_model import PrefillTerms
from loong.scheduler.paper.batching_program import Demand, Offer, SolvedBatch


class Program(NamedTuple):
    """The arguments of `solve`."""

    demands: list[Demand]
    offers: list[Offer]
    terms: list[PrefillTerms]


def random_program(random: Random, max_demands: int, max_offers: int) -> Program:
    """Long and short prompts, some alike, some weightless, on units of which some lack slots or instances."""
    demands = [_random_demand(random) for _ in range(random.randint(0, max_demands))]
    demands = [random.choice(demands) if random.random() < 0.3 else demand for demand in demands]
    if random.random() < 0.7:
        demands.sort(reverse=True)
    room = sum(demand.num_slots for demand in demands)
    offers = [_random_offer(random, room) for _ in range(random.randint(0, max_offers))]
    num_instances = sum(offer.num_instances for offer in offers)
    scale = random.choice([0.0, 0.1, 1.0, 3.0])
    terms = [
        PrefillTerms(
            overhead=random.random() * scale,
            floor=random.choice([0.0, random.random()]) * scale,
            per_token=1e-3 * random.random() / dop,
            per_cached_pair=0.0,
            per_new_pair=1e-6 * random.random() / dop,
            per_prompt=random.choice([0.0, random.random()]) * scale,
            launch=random.choice([0.0, 2 * random.random()]) * scale,
        )
        for dop in range(1, 1 + random.randint(num_instances // 2, num_instances))
    ]
    return Program(demands, offers, terms)


def _random_demand(random: Random) -> Demand:
    num_tokens = int(10 ** (4 * random.random()))
    weight = random.choice([0.0, 1.0, 1 / num_tokens, random.random()])
    return Demand(num_tokens, num_tokens, num_tokens**2, weight)


def _random_offer(random: Random, room: int) -> Offer:
    return Offer(
        num_instances=random.choice([0, 1, 1, 1, 2, 3]),
        num_free=random.choice([room, random.randint(0, room)]),
        delayed_weight=random.choice([0.0, 0.0, random.random()]),
    )


def cost_of(batch: SolvedBatch, program: Program) -> float:
    """Return the cost of one batch; infinite where it is impossible."""
    demands, offers = program.demands[batch.demands], program.offers[batch.offers]
    dop = sum(offer.num_instances for offer in offers)
    num_free = sum(offer.num_free for offer in offers)
    if not 1 <= dop <= len(program.terms) or sum(demand.num_slots for demand in demands) > num_free:
        return inf
    time = program.terms[dop - 1].time(
        sum(demand.num_tokens for demand in demands),
        0,
        sum(demand.num_new_pairs for demand in demands),
        len(demands),
    )
    weight = sum(demand.weight for demand in demands)
    return time * (weight + sum(offer.delayed_weight for offer in offers))


def least_cost_of_all(program: Program) -> float:
    """Of every way to cut the demands, on every choice of runs of offers; exponential."""
    num_demands = len(program.demands)
    if not num_demands:
        return 0.0
    least = inf
    for num_cuts in range(num_demands):
        for cuts in combinations(range(1, num_demands), num_cuts):
            parts = [slice(j, i) for j, i in pairwise((0, *cuts, num_demands))]
            for runs in _runs(0, len(program.offers), len(parts)):
                batches = map(SolvedBatch, parts, runs)
                least = min(least, sum(cost_of(batch, program) for batch in batches))
    return least


def _runs(first: int, stop: int, num_runs: int) -> Iterator[Sequence[slice]]:
    """Yield every choice of `num_runs` runs within range(first, stop), in order and apart."""
    if not num_runs:
        yield ()
        return
    for h in range(first, stop):
        for k in range(h + 1, stop + 1):
            for others in _runs(k, stop, num_runs - 1):
                yield (slice(h, k), *others)


def least_cost_by_equation(program: Program) -> float:
    """Return equation (5), every term of it."""
    n, m = len(program.demands), len(program.offers)
    f = [[0.0] * (m + 1)] + [[inf] * (m + 1) for _ in range(n)]
    for i in range(1, n + 1):
        for k in range(1, m + 1):
            f[i][k] = f[i][k - 1]
            for j in range(i):
                for h in range(k):
                    f[i][k] = min(f[i][k], f[j][h] + cost_of(SolvedBatch(slice(j, i), slice(h, k)), program))
    return f[n][m]
