"""What a report says where policies planned by a cost model that was wrong."""

from collections.abc import Iterator

from loong.launcher.cost_model_alarm import LARGEST_ERROR
from loong.workloads.run_document import RuleRuns


def told_wrong_models(runs: RuleRuns) -> Iterator[str]:
    """Yield a sentence for each policy whose plans counted on times that were far off at a run's end."""
    for policy in runs.policies:
        worst: dict[str, float] = {}
        for run in runs.runs:
            for phase, error in (run.cost_model_errors or {}).items() if run.policy == policy else ():
                worst[phase] = max(error, worst.get(phase, 0.0))
        wrong = {phase: error for phase, error in worst.items() if error > LARGEST_ERROR}
        if wrong:
            told = " and ".join(f"{phase} batches by a factor of {1 + e:.2g}" for phase, e in wrong.items())
            yield (
                f"{policy} planned by a cost model that was wrong at the end of a run: {told}, in the mean. "
                "With a better one (`loong profile`, then `--cost-model`) it may do better."
            )
