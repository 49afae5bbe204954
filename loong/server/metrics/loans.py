"""Metrics of the room that engines lend each other."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from loong.lending.engine_room import Loan


class LoanCollector(Collector):
    """The loans of an engine, when the metrics are read."""

    def __init__(self, model_name: str, engine_id: int, loans: Callable[[], Sequence[Loan]]) -> None:
        self._model_name, self._engine_id, self._loans = model_name, engine_id, loans

    def collect(self) -> Iterator[Metric]:
        """Yield the tokens by the other engine."""
        lent, borrowed = Counter[int](), Counter[int]()
        for loan in self._loans():
            if loan.creditor_id == self._engine_id:
                lent[loan.debtor_id] += loan.num_tokens
            else:
                borrowed[loan.creditor_id] += loan.num_tokens
        for name, what, label, tokens in (
            ("loong:lent_tokens", "Tokens of room lent to another engine.", "debtor", lent),
            ("loong:borrowed_tokens", "Tokens of room that another engine lends.", "creditor", borrowed),
        ):
            family = GaugeMetricFamily(name, what, labels=("model_name", label))
            for engine_id, number in sorted(tokens.items()):
                family.add_metric((self._model_name, str(engine_id)), number)
            yield family
