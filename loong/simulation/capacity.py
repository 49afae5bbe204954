"""Capacity: the requests per second that instances complete, predicted by the simulator."""

from collections.abc import Sequence
from math import floor, inf, log10

from loong.core.errors import ConfigError
from loong.scheduler.config import PolicyConfig
from loong.scheduler.policy import make_policy
from loong.simulation.cluster import SimulatedCluster
from loong.simulation.config import Host, Load
from loong.simulation.run import simulate
from loong.workloads.metrics.slo import SLOLimits
from loong.workloads.request import RequestShape, WorkloadRequest

NUM_SAMPLED = 200  # requests, that a capacity is predicted for
POLICY = "static-sp"  # few large batches: simulated in milliseconds, and close to others while all are busy
LOAD_SHARE = 2 / 3  # of the capacity, that is sent where no rate is asked for


def predicted_capacity(
    cluster: SimulatedCluster, shapes: Sequence[RequestShape], host: Host, *, keeps_prefixes: bool
) -> float:
    """Return the requests per second at which one group of all instances works off `shapes`, sent at once.

    Raises `ConfigError` if none of them fits.
    """
    load = Load([WorkloadRequest(0.0, shape.alone()) for shape in shapes])
    policy = make_policy(POLICY, PolicyConfig())
    run = simulate(
        policy,
        cluster,
        load,
        lambda _: SLOLimits(inf, inf, inf),
        host=host,
        keeps_prefixes=keeps_prefixes,
    )
    ends = [record.finish_time for record in run.records if record.error is None]
    if not ends:
        raise ConfigError(
            f"no request fits the {cluster.max_request_tokens:,} tokens of KV that one may have; "
            "give more --kv-cache-tokens or a smaller --length-scale"
        )
    return len(ends) / max(ends)


def rounded_down(rate: float) -> float:
    """Return the greatest number of two digits that is not above a rate."""
    unit = 10.0 ** (floor(log10(rate)) - 1)
    return float(f"{floor(rate / unit * (1 + 1e-12)) * unit:.2g}")
