"""Metrics of a cluster, computed when Prometheus reads them."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from loong.core.instance import ElasticInstance
from loong.core.plan import PreemptionReason
from loong.core.request import RequestId
from loong.core.snapshot import ClusterStats, Snapshot
from loong.engine.client import ClusterView
from loong.engine.cluster_size import InstanceState
from loong.engine.prefix_hits import PrefixCounts
from loong.processes.logs import num_dropped_records

DROPPED = "Log records dropped because nobody read the log."
_DOPS = (*range(1, 9), 12, 16, 24, 32, 64)

_INSTANCE_GAUGES: tuple[tuple[str, str, Callable[[ElasticInstance], float]], ...] = (
    ("loong:instance_kv_tokens", "Tokens of KV held or reserved, by instance.", lambda i: i.kv_used),
    (
        "loong:instance_kv_cached_tokens",
        "Tokens of KV that no request reads, kept while there is room.",
        lambda i: i.kv_cached,
    ),
    ("loong:instance_kv_capacity_tokens", "Tokens of KV that an instance can hold.", lambda i: i.kv_capacity),
    ("loong:instance_busy", "1 while an instance runs a batch.", lambda i: i.batch_id is not None),
)
_ELASTIC_COUNTS: tuple[tuple[str, str, Callable[[ClusterStats], float]], ...] = (
    ("loong:esp_scale_up", "Batches whose group had grown.", lambda s: s.num_scale_ups),
    (
        "loong:esp_scale_down",
        "Batches whose group had shrunk, with its KV retained or moved.",
        lambda s: s.num_scale_downs,
    ),
    ("loong:esp_hand_over", "Batches that other instances took over.", lambda s: s.num_hand_overs),
    ("loong:kv_retained_tokens", "Tokens of KV kept in a ring prefill.", lambda s: s.num_retained_tokens),
    ("loong:kv_pushed_tokens", "Tokens of KV pushed out of their group.", lambda s: s.num_pushed_tokens),
    ("loong:kv_migrated_tokens", "Tokens of KV moved by migrations.", lambda s: s.num_migrated_tokens),
    ("loong:kv_memory_tokens", "Tokens of these moved to memory instances.", lambda s: s.num_memory_tokens),
    ("loong:kv_offloaded_tokens", "Tokens of KV moved to host memory.", lambda s: s.num_offloaded_tokens),
    ("loong:kv_loaded_tokens", "Tokens of KV moved back from host memory.", lambda s: s.num_loaded_tokens),
    ("loong:kv_copied_tokens", "Tokens of shared KV that were copied.", lambda s: s.num_copied_tokens),
    (
        "loong:kv_switched_tokens",
        "Tokens of KV that requests went on to read from another copy.",
        lambda s: s.num_switched_tokens,
    ),
    (
        "loong:kv_window_dropped_tokens",
        "Tokens of KV dropped in layers with a window alone.",
        lambda s: s.num_window_dropped_tokens,
    ),
    (
        "loong:kv_relayed_tokens",
        "Tokens of KV that batches read once for several requests, for each of these but one.",
        lambda s: s.num_relayed_tokens,
    ),
    ("loong:kv_served_tokens", "Tokens of KV that batches read elsewhere.", lambda s: s.num_served_tokens),
    ("loong:leases", "Batches of several decode steps.", lambda s: s.num_leases),
    ("loong:group_leases", "Leases of several instances.", lambda s: s.num_group_leases),
    ("loong:multi_master_leases", "Leases with several masters.", lambda s: s.num_multi_master_leases),
    ("loong:served_leases", "Leases that read KV elsewhere.", lambda s: s.num_served_leases),
    ("loong:micro_batched_leases", "Leases cut into micro-batches.", lambda s: s.num_micro_batched_leases),
    ("loong:batching_program_calls", "Calls of the batching program.", lambda s: s.num_program_calls),
    (
        "loong:batching_program_calls_of_several",
        "Calls of the batching program with several prompts.",
        lambda s: s.num_program_calls_of_several,
    ),
    ("loong:busy_seconds", "Seconds in which a batch ran.", lambda s: s.busy_seconds),
    (
        "loong:two_prompt_groups_seconds",
        "Seconds in which two groups of several instances computed prompts.",
        lambda s: s.two_prompt_groups_seconds,
    ),
)


class ClusterCollector(Collector):
    """The metrics of a snapshot, taken when the metrics are read.

    `is_deferred` returns whether a request waits because the policy deferred it.
    """

    def __init__(
        self, model_name: str, engine: ClusterView, is_deferred: Callable[[RequestId], bool]
    ) -> None:
        self._model_name, self._engine, self._is_deferred = model_name, engine, is_deferred

    def collect(self) -> Iterator[Metric]:
        """Take a snapshot and yield its metrics."""
        snapshot = self._engine.snapshot()
        stats = snapshot.stats
        capacity, used = snapshot.kv_capacity, snapshot.kv_used
        running_ids = {view.request_id for view in snapshot.running} | snapshot.ending_ids
        yield self._gauge("vllm:num_requests_running", "Requests being computed.", len(running_ids))
        num_waiting = len(snapshot.waiting) + len(snapshot.following)
        yield self._gauge("vllm:num_requests_waiting", "Requests without KV.", num_waiting)
        yield self._waiting_by_reason(snapshot)
        yield self._gauge(
            "vllm:kv_cache_usage_perc", "KV in use; 1 is all.", used / capacity if capacity else 0
        )
        yield self._counter("vllm:num_preemptions", "Requests that lost their KV.", stats.num_preemptions)
        yield self._preemptions(stats.num_preemptions_by_reason)
        yield self._counter(
            "loong:computed_tokens", "Tokens whose KV was computed.", stats.num_computed_tokens
        )
        yield self._counter(
            "loong:recomputed_tokens",
            "Tokens whose KV was computed again, since it had been evicted, or lost with an instance.",
            stats.num_recomputed_tokens,
        )
        yield from self._prefix_cache()
        for series, what, count in _ELASTIC_COUNTS:
            yield self._counter(series, what, count(stats))
        yield self._counter("loong:instance_losses", "Instances that were lost.", stats.num_losses)
        yield self._counter(
            "loong:instance_joins", "Instances that joined, for the first time or again.", stats.num_joins
        )
        yield self._counter("loong:instance_leaves", "Instances that left.", stats.num_leaves)
        yield self._by_state()
        yield self._counter(
            "loong:log_records_dropped",
            DROPPED,
            num_dropped_records(),
        )
        yield self._counter(
            "loong:stray_frames",
            "Dropped frames on private sockets that were not messages.",
            self._engine.num_stray_frames,
        )
        yield self._group_sizes(stats.num_batches_by_dop)
        for name, what, value in _INSTANCE_GAUGES:
            yield self._instances(name, what, snapshot, value)

    def _gauge(self, name: str, what: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, what, labels=("model_name",))
        family.add_metric((self._model_name,), value)
        return family

    def _counter(self, name: str, what: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(name, what, labels=("model_name",))
        family.add_metric((self._model_name,), value)
        return family

    def _waiting_by_reason(self, snapshot: Snapshot) -> GaugeMetricFamily:
        waiting = snapshot.waiting
        num_deferred = sum(self._is_deferred(view.request_id) for view in waiting)
        labels = ("model_name", "reason")
        family = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", "Requests without KV, by reason.", labels=labels
        )
        family.add_metric((self._model_name, "capacity"), len(waiting) - num_deferred)
        family.add_metric((self._model_name, "deferred"), num_deferred)
        family.add_metric((self._model_name, "shared_prefix"), len(snapshot.following))
        return family

    def _prefix_cache(self) -> Iterator[CounterMetricFamily]:
        """Yield the counts of the prefix cache: vLLM's, and the tokens read by place."""
        counts = self._engine.prefix_counts or PrefixCounts()
        yield self._counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", counts.num_asked
        )
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens found there.", counts.num_hits)
        family = CounterMetricFamily(
            "loong:cached_tokens",
            "Tokens read from the prefix cache instead of being computed, by place.",
            labels=("model_name", "tier", "instance"),
        )
        for instance_id, num_tokens in counts.read_by_instance.items():
            family.add_metric((self._model_name, "device", str(instance_id)), num_tokens)
        yield family

    def _preemptions(self, counts: Mapping[PreemptionReason, int]) -> CounterMetricFamily:
        what = "Requests that lost their KV, by reason."
        family = CounterMetricFamily("loong:preemptions", what, labels=("model_name", "reason"))
        for reason in PreemptionReason:
            family.add_metric((self._model_name, reason.value), counts.get(reason, 0))
        return family

    def _by_state(self) -> GaugeMetricFamily:
        counts = Counter(instance.state for instance in self._engine.size().instances)
        family = GaugeMetricFamily("loong:instances", "Instances by state.", labels=("model_name", "state"))
        for state in InstanceState:
            family.add_metric((self._model_name, state.value), counts[state])
        return family

    def _group_sizes(self, num_batches_by_dop: Mapping[int, int]) -> HistogramMetricFamily:
        family = HistogramMetricFamily("loong:esp_group_size", "Batches by DoP.", labels=("model_name",))
        buckets = [
            (f"{float(bound)}", sum(count for dop, count in num_batches_by_dop.items() if dop <= bound))
            for bound in _DOPS
        ]
        buckets.append(("+Inf", sum(num_batches_by_dop.values())))
        total = sum(dop * count for dop, count in num_batches_by_dop.items())
        family.add_metric((self._model_name,), buckets, total)
        return family

    def _instances(
        self, name: str, what: str, snapshot: Snapshot, value: Callable[[ElasticInstance], float]
    ) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, what, labels=("model_name", "instance"))
        for instance in snapshot.instances:
            family.add_metric((self._model_name, str(instance.instance_id)), value(instance))
        return family


class CostModelCollector(Collector):
    """The accuracy of the cost model, when the metrics are read."""

    def __init__(self, model_name: str, errors: Callable[[], Mapping[str, float]]) -> None:
        self._model_name, self._errors = model_name, errors

    def collect(self) -> Iterator[Metric]:
        """Yield one gauge, with a value for each phase that has run."""
        family = GaugeMetricFamily(
            "loong:cost_model_relative_error",
            "Mean error of predicted times of the last batches; 1 is twice or half as long.",
            labels=("model_name", "phase"),
        )
        for phase, error in self._errors().items():
            family.add_metric((self._model_name, phase), error)
        yield family
