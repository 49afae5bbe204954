"""Counters of a server during a run, from the Prometheus text of its `/metrics`.

A server that lacks a metric (another engine, an older version) leaves its field None: not known, not zero.
"""

from collections import Counter
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from loong.workloads.metrics.result import JSON

GROUP_SIZE_BUCKET = "loong:esp_group_size_bucket"
SCALE_UP = "loong:esp_scale_up_total"
SCALE_DOWN = "loong:esp_scale_down_total"
RETAINED_TOKENS = "loong:kv_retained_tokens_total"
MIGRATED_TOKENS = "loong:kv_migrated_tokens_total"
COST_MODEL_ERROR = "loong:cost_model_relative_error"
PREEMPTIONS = "vllm:num_preemptions_total"


@dataclass(frozen=True, slots=True)
class ServerCounters:
    """Totals since the server started, or over a run: `after.since(before)`.

    `num_batches_by_dop` maps a DoP to the batches that ran with it. `cost_model_errors` is no total. It is
    the mean error of the predicted times of each phase's last batches; 1 means twice or half as long.
    """

    num_batches_by_dop: dict[int, int] | None = None
    num_scale_ups: int | None = None
    num_scale_downs: int | None = None
    num_retained_tokens: int | None = None
    num_migrated_tokens: int | None = None
    num_preemptions: int | None = None
    cost_model_errors: dict[str, float] | None = None

    def as_json(self) -> dict[str, JSON]:
        """Return the counts by their names, null where the server does not count."""
        by_dop: dict[str, JSON] | None = None
        if self.num_batches_by_dop is not None:
            by_dop = {str(dop): count for dop, count in self.num_batches_by_dop.items()}
        return {
            "num_batches_by_dop": by_dop,
            "num_scale_ups": self.num_scale_ups,
            "num_scale_downs": self.num_scale_downs,
            "num_retained_tokens": self.num_retained_tokens,
            "num_migrated_tokens": self.num_migrated_tokens,
            "num_preemptions": self.num_preemptions,
            "cost_model_errors": None if self.cost_model_errors is None else {**self.cost_model_errors},
        }

    def since(self, before: "ServerCounters") -> "ServerCounters":
        """Return the increase since `before` was taken; a count that `before` lacks was 0."""
        by_dop = self.num_batches_by_dop
        if by_dop is not None:
            earlier = before.num_batches_by_dop or {}
            by_dop = {dop: count - earlier.get(dop, 0) for dop, count in by_dop.items()}
        return ServerCounters(
            num_batches_by_dop=by_dop,
            num_scale_ups=_difference(self.num_scale_ups, before.num_scale_ups),
            num_scale_downs=_difference(self.num_scale_downs, before.num_scale_downs),
            num_retained_tokens=_difference(self.num_retained_tokens, before.num_retained_tokens),
            num_migrated_tokens=_difference(self.num_migrated_tokens, before.num_migrated_tokens),
            num_preemptions=_difference(self.num_preemptions, before.num_preemptions),
            cost_model_errors=self.cost_model_errors,
        )


def parse_counters(text: str) -> ServerCounters:
    """Read the counters out of a scrape, summed over label sets.

    Raises:
        ValueError: the text is not in Prometheus's format.
    """
    totals: Counter[str] = Counter()
    up_to_dop: Counter[float] = Counter()
    errors: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == COST_MODEL_ERROR:
                errors[sample.labels["phase"]] = sample.value
                continue
            totals[sample.name] += round(sample.value)
            if sample.name == GROUP_SIZE_BUCKET:
                up_to_dop[float(sample.labels["le"])] += round(sample.value)
    return ServerCounters(
        num_batches_by_dop=_per_dop(up_to_dop) if up_to_dop else None,
        num_scale_ups=totals.get(SCALE_UP),
        num_scale_downs=totals.get(SCALE_DOWN),
        num_retained_tokens=totals.get(RETAINED_TOKENS),
        num_migrated_tokens=totals.get(MIGRATED_TOKENS),
        num_preemptions=totals.get(PREEMPTIONS),
        cost_model_errors=errors or None,
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


def _difference(after: int | None, before: int | None) -> int | None:
    return None if after is None else after - (before or 0)
