"""The metrics of several engines, as one server writes them."""

from collections import defaultdict

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from scripted_engine import ScriptedEngine

from loong.server.cluster_app import cluster_of
from loong.server.engines.metrics import LABEL, JoinedMetrics, families_of, is_summed
from loong.server.metrics.prometheus import E2E_SECONDS, MetricFamilies
from loong.server.settings import ServerSettings


def written(num_requests: int) -> str:
    """Return what an engine writes that has served some requests."""
    registry = cluster_of(ScriptedEngine(num_stray_frames=num_requests), ServerSettings("tiny")).registry
    served = MetricFamilies(registry, "tiny").histogram("vllm:request_queue_time_seconds", "", E2E_SECONDS)
    served.observe_all([0.5] * num_requests)
    return generate_latest(registry).decode()


def samples(metrics: JoinedMetrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    registry = CollectorRegistry()
    registry.register(metrics)
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    names = [family.name for family in families]
    assert len(names) == len(set(names)), names
    found = [s for family in families for s in family.samples]
    assert len(found) == len({(s.name, frozenset(s.labels.items())) for s in found}), "a series twice"
    return {(s.name, frozenset(s.labels.items())): s.value for s in found}


def test_each_series_is_the_sum_or_names_its_engine() -> None:
    metrics, texts = JoinedMetrics(()), [written(2), written(5)]
    for engine_id, text in enumerate(texts):
        metrics.take(engine_id, text)
    expected: defaultdict[tuple[str, frozenset[tuple[str, str]]], float] = defaultdict(float)
    for engine_id, text in enumerate(texts):
        for family in families_of(text):
            own = set() if is_summed(family) else {(LABEL, str(engine_id))}
            for sample in family.samples:
                expected[sample.name, frozenset({*sample.labels.items(), *own})] += sample.value
    found = samples(metrics)
    assert found == expected
    totals = {name: value for (name, _), value in found.items()}
    assert totals["loong:stray_frames_total"] == totals["vllm:request_queue_time_seconds_count"] == 7
    labels = {name: dict(series).get(LABEL) for name, series in found}
    assert labels["vllm:num_requests_running"] is None
    assert None not in (labels["vllm:kv_cache_usage_perc"], labels["process_resident_memory_bytes"])


def test_no_count_falls_when_an_engine_starts_again() -> None:
    metrics = JoinedMetrics(())
    metrics.take(0, written(2))
    metrics.take(1, written(5))
    before = samples(metrics)
    metrics.end(1)
    assert not any(dict(labels).get(LABEL) == "1" for _, labels in samples(metrics))
    metrics.take(1, written(0))
    after = samples(metrics)
    counted = [series for series in before if series[0].endswith(("_total", "_count", "_bucket", "_sum"))]
    summed = [series for series in counted if LABEL not in dict(series[1])]
    assert summed
    assert all(after[series] == before[series] for series in summed)
