"""A profile from its start to its file."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
from tqdm import tqdm

from loong.core.attention_kernels import AttentionKernels
from loong.core.errors import ConfigError
from loong.executor.lookahead import LookaheadMargin
from loong.hardware.cost_model_file import AttentionTiles, CostModelFile, write_cost_model
from loong.hardware.devices import DEVICES, keeps_fp8
from loong.hardware.machine import num_processors
from loong.hardware.model_shape import shape_of
from loong.launcher.cluster.start import cluster_workers
from loong.launcher.cluster_flags import ChosenCluster
from loong.profiling.found import Instances, found
from loong.profiling.measure import Measured, Profiler
from loong.profiling.profiled_cluster import ProfiledCluster
from loong.profiling.reader_runs import Readers, crowding_of, measured_readers
from loong.profiling.scenarios import LEAST_CHUNK, LEAST_ROOM, Limits
from loong.profiling.served_runs import measured_lane
from loong.scheduler.cost.cost_model import ServiceLane, WorkCostModel
from loong.scheduler.cost.roofline import roofline
from loong.workloads.report.report import table

NUM_SIGNIFICANT = 4  # digits of a coefficient that are shown


def profile(chosen: ChosenCluster, limits: Limits, duration: float, output: Path) -> None:
    """Measure for `duration` seconds, print the results, and write them.

    Raises `ConfigError` if an instance has too little room, or the file cannot be written.
    """
    if chosen.cluster.kv_capacity < LEAST_ROOM:
        raise ConfigError(
            f"an instance holds {chosen.cluster.kv_capacity} tokens; a profile needs {LEAST_ROOM}"
        )
    shape, tp_size = shape_of(chosen.model, keeps_fp8=keeps_fp8(chosen.device)), chosen.cluster.tp_size
    prior = roofline(shape, DEVICES[chosen.device], tp_size, chosen.cluster.host_ids)
    tiles = _attention_tiles(chosen)
    cluster = replace(chosen.cluster, graph_limits=prior.graph_limits, least_saved=1)
    if tiles is not None:
        cluster = replace(cluster, attention_tiles=msgspec.structs.astuple(tiles))
    print(_heading(chosen, duration), flush=True)
    measured, lane, readers = asyncio.run(_measure(replace(chosen, cluster=cluster), limits, prior, duration))
    if lane is not None:
        prior = replace(prior, lane=lane)
    instances = Instances(
        chosen.name, shape, tp_size, chosen.device, chosen.cluster.num_instances, chosen.cluster.host_ids
    )
    file = found(instances, prior, measured, tiles)
    write_cost_model(file, output)
    _print(file, lane, readers, output)


def _heading(chosen: ChosenCluster, duration: float) -> str:
    """Return what is measured and, where processes share cores, a note on that."""
    cluster = chosen.cluster
    dops = f"1 to {cluster.num_instances}" if cluster.num_instances > 1 else "1"
    heading = (
        f"Measuring {chosen.name} on groups of DoP {dops} for about {duration:g} s, after a round "
        "that warms up; each kind of step runs once in any case"
    )
    num_processes, num_cores = cluster.num_instances * cluster.tp_size, num_processors()
    if chosen.device == "cpu" and num_processes > num_cores:
        heading += f"\n{num_processes} processes share {num_cores} cores: larger groups are slower for it"
    return heading


def _attention_tiles(chosen: ChosenCluster) -> AttentionTiles | None:
    """Return the attention tiles that a library computes fastest on the first GPU; None on processors."""
    if chosen.cluster.device == "cpu":
        return None
    from loong.model.tile_sizes import measured_tile_sizes  # not at the top: its kernels need a GPU

    kernels = AttentionKernels(chosen.cluster.attention_kernels)
    sizes = measured_tile_sizes(chosen.model, chosen.cluster.tp_size, 0, kernels)
    return None if sizes is None else AttentionTiles(*sizes)


async def _measure(
    chosen: ChosenCluster, limits: Limits, prior: WorkCostModel, duration: float
) -> tuple[list[Measured], ServiceLane | None, tuple[Readers, ...]]:
    timely = max(LEAST_CHUNK, prior.prefill_terms(1).max_tokens(limits.max_step_seconds, 0))
    async with cluster_workers(chosen.cluster, LookaheadMargin.on(prior.host)) as executor:
        cluster = ProfiledCluster(
            executor.members.serving(chosen.cluster.instances), executor, prior.host.idle
        )
        with tqdm(total=round(duration), unit="s", desc="measuring", disable=None) as bar:

            def show(elapsed: float) -> None:
                bar.update(min(round(elapsed), round(duration)) - bar.n)

            measured = await Profiler(cluster, limits, prior).measure(duration, show)
        chunk_tokens = min(limits.max_chunk_tokens, timely)
        lane = await measured_lane(cluster, chunk_tokens, prior)
        readers = await measured_readers(cluster, chunk_tokens, prior)
        if lane is not None and (crowding := crowding_of(readers)) is not None:
            lane = replace(lane, crowding=crowding)
        return measured, lane, readers


def _print(file: CostModelFile, lane: ServiceLane | None, readers: Sequence[Readers], output: Path) -> None:
    coefficients = [
        (name, f"{1e6 * value:.{NUM_SIGNIFICANT}g}", "roofline" if name in file.undetermined else "measured")
        for name, value in file.coefficients.items()
    ]
    errors = [
        (label, str(e.num_samples), f"{e.mean:.1%}", f"{e.p95:.1%}", f"{e.worst:.1%}")
        for label, e in file.errors.items()
    ]
    limits = [(name, f"{least:g}", f"{greatest:,.0f}") for name, (least, greatest) in file.ranges.items()]
    print(table(("coefficient", "us", "from"), coefficients), end="\n\n")
    print(table(("relative error, held out", "samples", "mean", "P95", "worst"), errors), end="\n\n")
    print(table(("measured, an instance", "least", "greatest"), limits), end="\n\n")
    if lane is not None:
        print(
            f"A step waits {1e3 * lane.delay:.2f} ms for attention of instances that compute, "
            f"and these lose {1e3 * lane.loss:.2f} ms to it besides their reads.",
            end="\n\n",
        )
    if readers:
        rows = [(str(r.num_readers), f"{1e3 * r.step:.2f}", f"{r.lost:.1%}") for r in readers]
        print(table(("readers of an instance", "step, ms", "lost of its chunks"), rows), end="\n\n")
    if file.attention_tiles is not None:
        print(f"tiles of the library: {file.attention_tiles}", end="\n\n")
    print(f"A plan takes {file.repeat_spread:.1%} longer than at its quickest (medians). Wrote {output}.")
    print(msgspec.json.encode({"output": str(output), "errors": file.errors}).decode())
