"""Text tables of a simulation: its setting, and policies that ran at one rate."""

from collections.abc import Sequence

from loong.simulation.config import SimulateConfig
from loong.simulation.points import PointResult
from loong.workloads.metrics.slo import SLORule
from loong.workloads.report.report import format_buckets, format_comparison, format_counters, format_run
from loong.workloads.workload import origin_of


def heading(config: SimulateConfig) -> str:
    """Return the lines on the simulated hardware, the origin of its times, and the workload."""
    hardware, load = config.hardware, config.load
    count = (
        f"{load.num_requests} requests"
        if load.num_requests
        else f"{load.duration:g} s of requests are measured"
    )
    origin = "times as measured by loong profile"
    if not hardware.measured:
        origin = "times from its roofline, nothing was measured"
    spread = f" over {hardware.num_hosts} hosts" if hardware.num_hosts > 1 else ""
    if hardware.memory_instances:
        memory_device = hardware.memory_device or hardware.device
        spread += f" and {hardware.memory_instances} memory instances on {memory_device}"
    if (windows := hardware.windows) is not None:
        spread += (
            f", with KV of {windows.capacity:,} tokens on each in layers with a window, "
            f"of up to {windows.most_requests} long requests at a time"
        )
    hypothetical = [policy for policy in config.policies if hardware.assumes_more_service(policy)]
    return (
        f"Simulated: {config.model} on {hardware.num_instances} instances of {hardware.tp_size} x "
        f"{hardware.device}{spread}; {origin}\n"
        f"Workload: {load.workload} ({origin_of(load.workload)}, scale {load.length_scale:g}), "
        f"{count}, seed {load.seed}\n"
        + "".join(f"{line}\n" for line in config.chosen)
        + "".join(
            f"{policy}: as if {hardware.device}s served any batch of others, which workers on them do not\n"
            for policy in hypothetical
        )
    )


def runs(rule: SLORule, results: Sequence[PointResult]) -> str:
    """Return a block a policy, and the policies side by side: for one rate."""
    blocks = []
    for result in results:
        blocks.append(format_run(result.policy, result.metrics, rule.describe()))
        blocks.append(format_buckets(result.metrics))
        blocks.append(format_counters(result.counters))
    if len(results) > 1:
        blocks.append(format_comparison({result.policy: [result.metrics] for result in results}))
    return "\n\n".join(blocks)


def refusals(results: Sequence[PointResult]) -> str:
    """Return a line for each policy that refused requests that it can never hold; empty if none did."""
    worst: dict[str, tuple[int, int]] = {}
    for result in results:
        policy, metrics = result.policy, result.metrics
        if metrics.num_failed and not result.is_cut_off:
            worst[policy] = max(worst.get(policy, (0, 0)), (metrics.num_failed, metrics.num_sent))
    return "\n".join(
        f"{policy} refused {num_refused} of {num_sent} requests: they need more KV than it gives one request"
        for policy, (num_refused, num_sent) in worst.items()
    )
