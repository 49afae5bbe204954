"""The metrics of several engines as one: a sum where it is right, and else a label `engine`."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from loong.processes.logs import num_dropped_records
from loong.server.engines.router import EngineRouter
from loong.server.metrics.cluster_metrics import DROPPED

LABEL = "engine"
SUMMED_GAUGES = frozenset(
    {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:num_requests_waiting_by_reason",
        "loong:instances",
    }
)
_COUNTED = ("counter", "histogram")

M = TypeVar("M", CounterMetricFamily, GaugeMetricFamily)
Series: TypeAlias = tuple[str, tuple[tuple[str, str], ...]]
"""The name and the labels of a sample."""


def families_of(text: str) -> list[Metric]:
    """Return the metrics that an engine has written."""
    found = text_string_to_metric_families(text)
    return [family for family in found if not family.name.endswith("_created")]


def is_summed(family: Metric) -> bool:
    """Return whether the values of several engines are added.

    Ids of instances are an engine's own, and so is what a process uses.
    """
    is_own = family.name.startswith("process_") or any("instance" in s.labels for s in family.samples)
    return not is_own and (family.type in _COUNTED or family.name in SUMMED_GAUGES)


@dataclass
class _Joined:
    """A family of all engines."""

    family: Metric
    values: dict[Series, float] = field(default_factory=dict)

    def add(self, sample: Sample, labels: Mapping[str, str]) -> None:
        series = sample.name, tuple(labels.items())
        self.values[series] = self.values.get(series, 0.0) + sample.value

    def metric(self) -> Metric:
        joined = Metric(self.family.name, self.family.documentation, self.family.type)
        joined.samples = [Sample(name, dict(labels), value) for (name, labels), value in self.values.items()]
        return joined


def joined(by_engine: Mapping[int, Iterable[Metric]], others: Iterable[Metric] = ()) -> list[Metric]:
    """Return the metrics of several engines as one. Those of `others` are added as they are."""
    found: dict[str, _Joined] = {}
    for engine_id, families in by_engine.items():
        for family in families:
            into = found.setdefault(family.name, _Joined(family))
            own = {} if is_summed(family) else {LABEL: str(engine_id)}
            for sample in family.samples:
                into.add(sample, {**sample.labels, **own})
    for family in others:
        into = found.setdefault(family.name, _Joined(family))
        for sample in family.samples:
            into.add(sample, sample.labels)
    return [one.metric() for one in found.values()]


class JoinedMetrics(Collector):
    """The metrics of all engines as they were last read, and those of this process, which has `collectors`.

    Sums include what engines had counted that are lost, so that no counter falls when one starts again.
    """

    def __init__(self, collectors: Sequence[Collector]) -> None:
        self._collectors = collectors
        self._latest: dict[int, list[Metric]] = {}
        self._ended: list[Metric] = []

    def take(self, engine_id: int, text: str) -> None:
        """Keep what an engine has written."""
        self._latest[engine_id] = families_of(text)

    def end(self, engine_id: int) -> None:
        """Keep only the counts of an engine that is lost, as they were last read."""
        families = self._latest.pop(engine_id, ())
        counted = [family for family in families if family.type in _COUNTED and is_summed(family)]
        self._ended = joined({engine_id: counted}, self._ended)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of all engines and of this process."""
        own = [family for collector in self._collectors for family in collector.collect()]
        yield from joined(self._latest, [*self._ended, *own])


class RouterCollector(Collector):
    """The counts of a router, and the log records that this process has dropped."""

    def __init__(self, model_name: str, router: EngineRouter, states: Callable[[], Iterable[str]]) -> None:
        self._model_name, self._router, self._states = model_name, router, states

    def collect(self) -> Iterator[Metric]:
        """Yield them."""
        stats = self._router.stats
        routed = self._by_engine(CounterMetricFamily, "loong:routed_requests", "Requests, by engine.")
        for engine_id, number in sorted(stats.num_routed.items()):
            routed.add_metric((self._model_name, str(engine_id)), number)
        yield routed
        work = self._by_engine(GaugeMetricFamily, "loong:engine_outstanding_tokens", "Work of open requests.")
        for engine_id, number in self._router.outstanding().items():
            work.add_metric((self._model_name, str(engine_id)), number)
        yield work
        waiting = GaugeMetricFamily(
            "loong:requests_without_engine", "Requests that wait for any engine.", labels=("model_name",)
        )
        waiting.add_metric((self._model_name,), stats.num_waiting)
        yield waiting
        by_state = GaugeMetricFamily("loong:engines", "Engines by state.", labels=("model_name", "state"))
        for state, number in Counter(self._states()).items():
            by_state.add_metric((self._model_name, state), number)
        yield by_state
        for name, what, number in (
            ("loong:routed_cached_tokens", "Prompt tokens expected in caches.", stats.num_cached_tokens),
            ("loong:requests_taken_over", "Requests of lost engines that others took.", stats.num_taken_over),
            ("loong:engine_losses", "Engines that were lost.", stats.num_losses),
            ("loong:engine_joins", "Engines that began to serve.", stats.num_joins),
            ("loong:log_records_dropped", DROPPED, num_dropped_records()),
        ):
            family = CounterMetricFamily(name, what, labels=("model_name",))
            family.add_metric((self._model_name,), number)
            yield family

    def _by_engine(self, kind: type[M], name: str, what: str) -> M:
        return kind(name, what, labels=("model_name", LABEL))
