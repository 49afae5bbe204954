"""Prompts and decode leases on real workers, one batch at a time, for scripts that measure an iteration.

Workers run in processes of their own, on CPUs or GPUs. A batch is timed as the engine sees it, from its
commit until its whole group is done.
"""

import argparse
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from random import Random
from statistics import median

from real_run import add_worker_flags, chosen_workers

from loong.core.cost.cost_model import CostModel
from loong.core.instance import ESPGroup
from loong.core.placement import InstanceId
from loong.core.plan import BatchPlan, IterationPlan, Transfer
from loong.core.request import RequestId
from loong.executor.lookahead import LookaheadMargin
from loong.launcher.cluster.start import local_workers
from loong.profiling.measure import batch_sample
from loong.profiling.profiled_cluster import ProfiledCluster
from loong.scheduler.common.striping import batch_of, decode_part, retained_part, striped_part

NUM_REPEATS = 5
LEASE_STEPS = 16


def add_profiled_run_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the workers, and for the picture's folder."""
    add_worker_flags(parser)
    parser.add_argument("--output-dir", type=Path, help="folder for the picture (none is drawn)")


@dataclass(frozen=True, slots=True)
class Timed:
    """The median seconds of a repeated batch, or of a step of it, and the cost model's prediction."""

    seconds: float
    predicted: float


class ProfiledRuns:
    """Batches on one cluster; nothing is left of one when the next begins."""

    def __init__(self, cluster: ProfiledCluster, cost_model: CostModel) -> None:
        self._cluster, self._cost_model = cluster, cost_model
        self._random = Random(0)

    @property
    def instance_ids(self) -> list[InstanceId]:
        """Return all instances."""
        return [instance.instance_id for instance in self._cluster.snapshot().instances]

    def has_room(self, num_requests: int, length: int, instance_ids: Sequence[InstanceId]) -> bool:
        """Return whether these instances have room for such requests, evenly spread, and for a lease."""
        needed = num_requests * (-(-length // len(instance_ids)) + LEASE_STEPS + 1)
        return all(self._cluster.free()[instance_id] >= needed for instance_id in instance_ids)

    async def prefill(
        self, lengths: Sequence[int], group: Sequence[InstanceId], keepers: Sequence[InstanceId] = ()
    ) -> Timed:
        """Run whole prompts in a batch, striped over a group; `keepers`, if any, keep all KV."""
        times = []
        predicted = 0.0
        for _ in range(NUM_REPEATS + 1):
            arrived = self._arrive(lengths)
            batch = self._prompts(arrived, group, keepers)
            predicted = self._predicted(batch)
            times.append(await self._cluster.carry_out(IterationPlan((batch,))))
            self._cluster.end_all()
        return Timed(median(times[1:]), predicted)

    async def decode(
        self, num_requests: int, length: int, group: Sequence[InstanceId], num_masters: int
    ) -> Timed:
        """Run a step of a decode lease of equal requests whose KV is spread over a group."""
        arrived = self._arrive([length] * num_requests)
        await self._cluster.carry_out(IterationPlan((self._prompts(arrived, group, ()),)))
        times = []
        predicted = 0.0
        for _ in range(NUM_REPEATS + 1):
            views = self._cluster.views(arrived)
            if not all(self._cluster.free()[i] > num_requests * LEASE_STEPS for i in group):
                break
            parts = [
                decode_part(view, master, LEASE_STEPS)
                for view, master in zip(views, cycle(group[:num_masters]), strict=False)
            ]
            batch = batch_of(ESPGroup(tuple(group)), parts, LEASE_STEPS)
            predicted = self._predicted(batch)
            times.append(await self._cluster.carry_out(IterationPlan((batch,))))
        self._cluster.end_all()
        return Timed(median(times[1:] or times) / LEASE_STEPS, predicted / LEASE_STEPS)

    def _arrive(self, lengths: Sequence[int]) -> list[RequestId]:
        return [self._cluster.arrive(length, self._random) for length in lengths]

    def _prompts(
        self, request_ids: Sequence[RequestId], group: Sequence[InstanceId], keepers: Sequence[InstanceId]
    ) -> BatchPlan:
        members = ESPGroup(tuple(group))
        parts = []
        for view in self._cluster.views(request_ids):
            number = view.num_uncomputed_tokens
            if keepers:
                room: Mapping[InstanceId, int] = dict.fromkeys(keepers, number)
                parts.append(retained_part(view, number, members, room))
            else:
                parts.append(striped_part(view, number, members, Transfer.KV))
        return batch_of(members, parts)

    def _predicted(self, batch: BatchPlan) -> float:
        starts_idle = self._cluster.starts_idle(batch.group)
        sample = batch_sample(batch, self._cluster.placements(), starts_idle=starts_idle)
        return sample.predicted(self._cost_model)


@asynccontextmanager
async def profiled_runs(args: argparse.Namespace) -> AsyncIterator[ProfiledRuns]:
    """Start the workers that the flags name, and end them."""
    cluster, model = chosen_workers(args)
    async with local_workers(cluster, LookaheadMargin.on(model.host)) as executor:
        instances = executor.members.serving(cluster.instances)
        yield ProfiledRuns(ProfiledCluster(instances, executor, model.host.idle), model)


def dops_up_to(num_instances: int) -> list[int]:
    """Return 1, 2, 4 ... and all of them."""
    return [*(1 << i for i in range(num_instances.bit_length()) if 1 << i < num_instances), num_instances]
