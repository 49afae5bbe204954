"""Counters of a server during a run, from the Prometheus text of its `/metrics`.

A server that lacks a metric (another engine, an older version) leaves its field None: not known, not zero.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from prometheus_client.parser import text_string_to_metric_families

from loong.workloads.metrics.result import JSON

GROUP_SIZE_BUCKET = "loong:esp_group_size_bucket"
COST_MODEL_ERROR = "loong:cost_model_relative_error"
SERIES: Mapping[str, str] = {
    "num_scale_ups": "loong:esp_scale_up_total",
    "num_scale_downs": "loong:esp_scale_down_total",
    "num_hand_overs": "loong:esp_hand_over_total",
    "num_retained_tokens": "loong:kv_retained_tokens_total",
    "num_pushed_tokens": "loong:kv_pushed_tokens_total",
    "num_migrated_tokens": "loong:kv_migrated_tokens_total",
    "num_memory_tokens": "loong:kv_memory_tokens_total",
    "num_copied_tokens": "loong:kv_copied_tokens_total",
    "num_switched_tokens": "loong:kv_switched_tokens_total",
    "num_window_dropped_tokens": "loong:kv_window_dropped_tokens_total",
    "num_served_tokens": "loong:kv_served_tokens_total",
    "num_relayed_tokens": "loong:kv_relayed_tokens_total",
    "num_leases": "loong:leases_total",
    "num_group_leases": "loong:group_leases_total",
    "num_multi_master_leases": "loong:multi_master_leases_total",
    "num_served_leases": "loong:served_leases_total",
    "num_micro_batched_leases": "loong:micro_batched_leases_total",
    "num_program_calls": "loong:batching_program_calls_total",
    "num_program_calls_of_several": "loong:batching_program_calls_of_several_total",
    "busy_seconds": "loong:busy_seconds_total",
    "two_prompt_groups_seconds": "loong:two_prompt_groups_seconds_total",
    "num_preemptions": "vllm:num_preemptions_total",
}
"""The series of each count of `ServerCounters`, which has the same name in `ClusterStats`."""


@dataclass(frozen=True, slots=True)
class ServerCounters:
    """Totals since the server started, or over a run: `after.since(before)`.

    `num_batches_by_dop` maps a DoP to the batches that ran with it. `cost_model_errors` is no total. It is
    the mean error of the predicted times of each phase's last batches; 1 means twice or half as long. Other
    fields mean what they mean in `ClusterStats`.
    """

    num_batches_by_dop: dict[int, int] | None = None
    num_scale_ups: int | None = None
    num_scale_downs: int | None = None
    num_hand_overs: int | None = None
    num_retained_tokens: int | None = None
    num_pushed_tokens: int | None = None
    num_migrated_tokens: int | None = None
    num_memory_tokens: int | None = None
    num_copied_tokens: int | None = None
    num_switched_tokens: int | None = None
    num_window_dropped_tokens: int | None = None
    num_served_tokens: int | None = None
    num_relayed_tokens: int | None = None
    num_leases: int | None = None
    num_group_leases: int | None = None
    num_multi_master_leases: int | None = None
    num_served_leases: int | None = None
    num_micro_batched_leases: int | None = None
    num_program_calls: int | None = None
    num_program_calls_of_several: int | None = None
    busy_seconds: float | None = None
    two_prompt_groups_seconds: float | None = None
    num_preemptions: int | None = None
    cost_model_errors: dict[str, float] | None = None

    def as_json(self) -> dict[str, JSON]:
        """Return the counts by their names, null where the server does not count."""
        counts: dict[str, JSON] = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.num_batches_by_dop is not None:
            counts["num_batches_by_dop"] = {str(dop): n for dop, n in self.num_batches_by_dop.items()}
        return counts

    def since(self, before: "ServerCounters") -> "ServerCounters":
        """Return the increase since `before` was taken; a count that `before` lacks was 0."""
        increases = {
            name: count - (getattr(before, name) or 0)
            for name in SERIES
            if (count := getattr(self, name)) is not None
        }
        by_dop = self.num_batches_by_dop
        if by_dop is not None:
            earlier = before.num_batches_by_dop or {}
            by_dop = {dop: count - earlier.get(dop, 0) for dop, count in by_dop.items()}
        return replace(self, num_batches_by_dop=by_dop, **increases)


def parse_counters(text: str) -> ServerCounters:
    """Read the counters out of a scrape, summed over label sets.

    Raises:
        ValueError: the text is not in Prometheus's format.
    """
    totals: dict[str, float] = {}
    up_to_dop: Counter[float] = Counter()
    errors: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == COST_MODEL_ERROR:
                errors[sample.labels["phase"]] = sample.value
                continue
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
            if sample.name == GROUP_SIZE_BUCKET:
                up_to_dop[float(sample.labels["le"])] += round(sample.value)
    known = {name: totals[series] for name, series in SERIES.items() if series in totals}
    return ServerCounters(
        num_batches_by_dop=_per_dop(up_to_dop) if up_to_dop else None,
        cost_model_errors=errors or None,
        **{name: round(total) if name.startswith("num_") else total for name, total in known.items()},  # type: ignore[arg-type]  # names of counts
    )


def _per_dop(up_to_dop: Counter[float]) -> dict[int, int]:
    """Undo the histogram's running sum; its bounds are whole numbers, and infinity adds nothing."""
    below = 0
    by_dop = {}
    for bound in sorted(up_to_dop):
        if bound < float("inf"):
            by_dop[int(bound)] = up_to_dop[bound] - below
            below = up_to_dop[bound]
    return by_dop
