"""Documents of runs as `docs/benchmarking.md` has them, with numbers that a test can predict."""

import json
from collections.abc import Sequence
from pathlib import Path

from loong.workloads.report.run_document import RunDocument, read_document

RULE = "tight (TTFT <= max(5 x unloaded prefill, 1 s), TPOT <= 50 ms)"
LOOSE = "absolute (TTFT <= 9000 ms)"


def run_row(policy: str, factor: float = 1.0, **fields: object) -> dict[str, object]:
    """Return a run of four requests whose times are `factor` times 10, 20, 40 and 80 ms; the last failed."""
    ttfts = [None if i == 3 else factor * 0.01 * 2**i for i in range(4)]
    latencies = {
        f"{statistic}_{name}_ms": factor * number
        for name, number in (("ttft", 23.25), ("tpot", 4.125), ("itl", 4.5), ("e2el", 123.75))
        for statistic in ("mean", "median", "std", "p90", "p95", "p99")
    }
    attained = sum(ratio <= 1 for ratio in (factor / 4, factor / 2, factor)) / 4
    bucket = {"bucket": "< 4k", "sent": 4, "slo_attainment": attained, **latencies}
    return {
        "policy": policy,
        "slo": RULE,
        "request_rate": 2.0,
        "repeat": 0,
        "seed": 7,
        "attains": attained >= 0.5,
        "is_cut_off": False,
        "duration": 12.5,
        "num_prompts": 4,
        "completed": 3,
        "failed": 1,
        "request_throughput": 0.24,
        "output_throughput": 31.5,
        "request_goodput": attained * 0.32,
        "slo_attainment": attained,
        **latencies,
        "by_prompt_length": [bucket, {"bucket": "> 128k", "sent": 0, "slo_attainment": None}],
        "num_batches_by_dop": {"1": 9, "4": 3},
        "num_scale_ups": 5,
        "ttfts": ttfts,
        "tpots": [None, 0.004, 0.005, None],
        "slo_ratios": [factor / 4, factor / 2, factor, None],
        "trace": None,
        **fields,
    }


def write_run(folder: Path, runs: Sequence[dict[str, object]], **fields: object) -> RunDocument:
    """Write `results.json` with these runs, and return it read back."""
    document = {
        "schema_version": 1,
        "kind": "bench",
        "command": "loong bench --workload '<mixed & more>'",
        "date": "2026-11-22T02:48:52+00:00",
        "machine": {"processor": "a processor", "num_cores": "2", "git_commit": "0123abc"},
        "configuration": {
            "workload": "mixed",
            "length_scale": 0.015625,
            "rates": [2.0, "inf"],
            "model": None,
        },
        "slos": [{"name": "tight", "description": RULE}],
        "attainment_goal": 0.5,
        "prefill_probe": {"seconds": [0.5], "fit": {"linear": 0.25}},
        "goodput": [],
        "runs": runs,
        **fields,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "results.json"
    path.write_text(json.dumps(document))
    return read_document(path)


def sweep(folder: Path) -> RunDocument:
    """Return two policies at three rates, twice each; the second attains at the lowest alone."""
    runs = [
        run_row(policy, factor * (1 + rate) * (1 + repeat / 10), request_rate=rate, repeat=repeat)
        for policy, factor in (("esp", 0.25), ("static-sp", 0.75))
        for rate in (1.0, 2.0, 4.0)
        for repeat in (0, 1)
    ]
    goodput = [
        {"policy": "esp", "slo": RULE, "request_rate": 4.0, "too_high_rate": None},
        {"policy": "static-sp", "slo": RULE, "request_rate": 1.0, "too_high_rate": 2.0},
    ]
    return write_run(folder, runs, goodput=goodput)
