"""Batches of every kind that the rules allow, from random runs."""

from collections.abc import Iterator, Mapping
from functools import cache
from random import Random
from typing import TypeAlias

from chaos import chaos
from simulation import simulate, timed_request

from loong.core.placement import Placement
from loong.core.plan import BatchPlan
from loong.core.request import RequestId

Batches: TypeAlias = tuple[tuple[BatchPlan, Mapping[RequestId, Placement]], ...]


@cache
def chaotic_run(seed: int) -> Batches:
    """Return batches on four instances, each with the KV of its requests before it."""
    random = Random(seed)
    requests = [
        timed_request(i, int(2000 ** random.random()), random.randint(1, 30), 0.1 * i) for i in range(24)
    ]
    return tuple(
        (batch, {r: snapshot.request[r].placement for r in batch.request_ids})
        for snapshot, plan in simulate(chaos(seed), [4000] * 4, requests).plans
        for batch in plan.batches
    )


def chaotic_batches(seeds: range) -> Iterator[tuple[BatchPlan, Mapping[RequestId, Placement]]]:
    """Yield the batches of several runs."""
    for seed in seeds:
        yield from chaotic_run(seed)
