"""Sentences of a report on policies whose predicted times were far off."""

from collections.abc import Iterator

from loong.observability.cost_model_alarm import LARGEST_ERROR
from loong.workloads.report.run_document import RuleRuns


def wrong_model_notes(runs: RuleRuns) -> Iterator[str]:
    """Yield a sentence for each policy whose cost model was far off at the end of a run."""
    for policy in runs.policies:
        measured = [run.cost_model_errors or {} for run in runs.runs if run.policy == policy]
        phases = dict.fromkeys(phase for errors in measured for phase in errors)
        worst = {phase: max(errors.get(phase, 0.0) for errors in measured) for phase in phases}
        wrong = [
            f"{phase} batches by a factor of {1 + e:.2g}" for phase, e in worst.items() if e > LARGEST_ERROR
        ]
        if wrong:
            yield (
                f"At the end of a run, the times that plans of {policy} counted on were off in the mean: "
                f"{' and '.join(wrong)}. A cost model that is measured while nothing else runs "
                "(loong profile, then --cost-model) may help."
            )
