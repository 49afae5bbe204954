"""One policy under one load in virtual time, by the loop that serves real clusters.

`simulate_policy("esp", "mixed", 1.0).attainment` is all that tuning a policy needs.
"""

import asyncio
from array import array
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from loong.core.cluster_state import ClusterState
from loong.core.events import TokensProduced
from loong.core.request import SLO, Request, RequestId, SamplingParams
from loong.core.snapshot import ClusterStats
from loong.executor.simulated import SimulatedExecutor
from loong.launcher.simulate_cluster import Hardware, SimulatedCluster, shape_of
from loong.model.shapes import find_config
from loong.scheduler.config import PolicyConfig
from loong.scheduler.policy import Policy, make_policy
from loong.scheduling import Observer, Scheduling
from loong.workloads.metrics import LimitsOf, Metrics, compute_metrics
from loong.workloads.record import RequestRecord, Usage
from loong.workloads.request import WorkloadRequest
from loong.workloads.slo import SLOLimits, parse_slo
from loong.workloads.workload import make_workload


@dataclass(slots=True)
class SimulatedRun:
    """What became of every request sent; all times are virtual seconds."""

    records: list[RequestRecord]
    stats: ClusterStats
    num_events: int


def simulate(
    policy: Policy,
    cluster: SimulatedCluster,
    load: Sequence[WorkloadRequest],
    limits_of: LimitsOf,
    observers: Sequence[Observer] = (),
) -> SimulatedRun:
    """Send `load` to an empty cluster, and run until all has ended.

    Requests bring their limits as their SLO. Those that need more KV than the policy could ever give are
    refused, as a server would.
    """
    state = ClusterState(cluster.instances)
    executor = SimulatedExecutor(cluster.cost_model, _admitted(load, cluster, limits_of))
    scheduling = Scheduling(state, policy, cluster.cost_model, executor, observers)
    token_times: dict[RequestId, array[float]] = {_request_id(i): array("d") for i in range(len(load))}
    num_events = asyncio.run(_drain(scheduling, token_times))
    records = [_record(sent, times, cluster) for sent, times in zip(load, token_times.values(), strict=True)]
    return SimulatedRun(records, state.snapshot(executor.now).stats, num_events)


def simulate_policy(
    policy: str,
    workload: str,
    request_rate: float,
    *,
    num_requests: int = 200,
    seed: int = 0,
    model: str = "llama-3.1-8b",
    device: str = "h200",
    num_instances: int = 8,
    slo: str = "tight",
    config: PolicyConfig | None = None,
) -> Metrics:
    """The metrics of one policy on a named workload at `request_rate` requests a second."""
    hardware = Hardware(shape_of(find_config(model, "dummy")), device, num_instances)
    rule = parse_slo(slo)
    load = make_workload(workload, num_requests, seed=seed, request_rate=request_rate)

    def limits_of(num_prompt_tokens: int) -> SLOLimits:
        return rule.limits(num_prompt_tokens, hardware.unloaded_prefill_time)

    run = simulate(make_policy(policy, config or PolicyConfig()), hardware.cluster(policy), load, limits_of)
    return compute_metrics(run.records, limits_of)


async def _drain(scheduling: Scheduling, token_times: dict[RequestId, "array[float]"]) -> int:
    """Run to the end, noting when each token came; returns the number of events."""
    num_events = 0
    async with aclosing(scheduling.events()) as events:
        async for event in events:
            num_events += 1
            if isinstance(event, TokensProduced):
                for token in event.tokens:
                    token_times[token.request_id].append(event.time)
    return num_events


def _admitted(
    load: Sequence[WorkloadRequest], cluster: SimulatedCluster, limits_of: LimitsOf
) -> Iterator[Request]:
    for number, sent in enumerate(load):
        if _is_admissible(sent, cluster):
            limits = limits_of(sent.num_prompt_tokens)
            yield Request(
                _request_id(number),
                range(sent.num_prompt_tokens),
                SamplingParams(max_tokens=sent.num_output_tokens),
                sent.arrival_time,
                SLO(limits.ttft, limits.tpot),
            )


def _is_admissible(sent: WorkloadRequest, cluster: SimulatedCluster) -> bool:
    """Whether its KV can ever fit; the last output token needs none."""
    return sent.num_prompt_tokens + sent.num_output_tokens - 1 <= cluster.max_request_tokens


def _record(sent: WorkloadRequest, times: "array[float]", cluster: SimulatedCluster) -> RequestRecord:
    error = None
    if len(times) < sent.num_output_tokens:
        is_refused = not _is_admissible(sent, cluster)
        error = "needs more KV than the policy gives one request" if is_refused else "never ended"
    return RequestRecord(
        request=sent,
        due_time=sent.arrival_time,
        sent_time=sent.arrival_time,
        token_times=times,
        finish_time=times[-1] if times else sent.arrival_time,
        usage=Usage(sent.num_prompt_tokens, len(times)),
        error=error,
    )


def _request_id(number: int) -> RequestId:
    return f"r{number:06}"
