"""The observers of a server's requests."""

from loong.core.cost.cost_model import CostModel
from loong.launcher.serve.config import ServeConfig
from loong.observability.decision_log.recent import RecentLines
from loong.observability.decision_log.runs import RequestRuns
from loong.scheduler.common.slo_targets import default_ttft
from loong.scheduler.cost.recalibration import Recalibration
from loong.server.metrics.request_observers import RequestObservers, Targets
from loong.server.metrics.spans import Spans, otlp_exporter


def request_observers(
    config: ServeConfig, cost_model: CostModel, recalibration: Recalibration, clock_start: float
) -> RequestObservers:
    """Return observers that judge requests by the targets of the policy, and send spans if asked to.

    `clock_start` is the Unix time of the engine's 0.
    """

    def target(num_prompt_tokens: int) -> Targets:
        widest = cost_model.prefill_terms(config.cluster.num_instances)
        return Targets(default_ttft(num_prompt_tokens, widest, config.policy), config.policy.target_tpot)

    endpoint, spans = config.otlp_traces_endpoint, None
    if endpoint is not None:
        spans = Spans(otlp_exporter(endpoint), config.server.served_model_name, clock_start)
    return RequestObservers(
        config.policy_name, RecentLines(), RequestRuns(), lambda: recalibration.errors, target, spans
    )
