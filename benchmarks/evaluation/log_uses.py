"""Uses of memory instances and of lent room, counted in decision logs of simulated runs.

Each run has a workload, and is simulated by `loong simulate`. Counted are tokens of prompts whose KV is
kept outside the instances that compute them, leases and those that others serve, and migrations of KV.
These go to memory instances or back from there, or are lent and returned, as the reasons of the logs say.
Needs no device.

    python benchmarks/evaluation/log_uses.py    # some minutes
"""

import shlex
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.append(str(Path(__file__).parents[1] / "support"))

from loong_runs import run_loong
from result import print_result, script_parser

from loong.core.decision import DecisionKind
from loong.observability.decision_log.lines import Line, LoggedBatch, PlannedLine
from loong.observability.decision_log.reader import read_log
from loong.observability.decision_log.story.index import indexed
from loong.observability.decision_log.story.loans import loans_of
from loong.workloads.report.report import table

CHATS = ("--workload", "sharegpt", "--rate", "40", "--num-requests", "400")
DOCUMENTS = ("--workload", "fixed(8000,400)", "--rate", "8", "--num-requests", "200")
UNEQUAL = ("--workload", "zipf(1.0,500,60000,400)", "--rate", "8", "--num-requests", "200")
SHORT = ("--kv-cache-tokens", "65536")
RUNS = (
    ("lamina", 2, CHATS),
    ("lamina", 2, DOCUMENTS),
    ("esp", 2, (*DOCUMENTS, *SHORT)),
    ("esp", 2, DOCUMENTS),
    ("infinite-paper", 0, (*DOCUMENTS, *SHORT)),
    ("infinite-paper", 0, (*UNEQUAL, *SHORT)),
    ("distkv", 0, (*DOCUMENTS, *SHORT)),
    ("distkv", 0, (*UNEQUAL, *SHORT)),
)
NUM_FULL = 4
COUNTS = (
    "batches with prompts",
    "tokens computed",
    "tokens pushed",
    "leases",
    "served leases",
    "moves",
    "tokens to memory",
    "tokens from memory",
    "loans",
    "tokens lent",
    "tokens returned",
)


def counts_of(lines: Iterable[Line], num_full: int) -> Counter[str]:
    """Return how often each use is in a log whose memory instances have ids from `num_full` on."""
    found = Counter[str](dict.fromkeys(COUNTS, 0))
    for line in lines:
        if not isinstance(line, PlannedLine):
            continue
        found["loans"] += sum(reason.kind is DecisionKind.LEND for reason in line.reasons)
        for batch in line.batches:
            _count_batch(found, batch)
        for move in line.migrations:
            found["moves"] += 1
            found["tokens to memory"] += move.num_tokens * (move.destination_id >= num_full)
            found["tokens from memory"] += move.num_tokens * (move.source_id >= num_full)
    return found


def _count_batch(found: Counter[str], batch: LoggedBatch) -> None:
    found["batches with prompts"] += bool(batch.chunks)
    for chunk in batch.chunks:
        found["tokens computed"] += chunk.num_tokens
        found["tokens pushed"] += sum(n for i, n in chunk.kept_on.items() if i not in batch.instance_ids)
    found["leases"] += batch.num_steps > 1
    found["served leases"] += batch.num_steps > 1 and bool(batch.holder_ids)


def main() -> None:
    args = script_parser("log_uses", __doc__).parse_args()
    rows, runs = [], []
    with TemporaryDirectory() as folder:
        for number, (policy, num_memory, load) in enumerate(RUNS):
            log = Path(folder) / f"{number}.jsonl"
            words = [*load, "--policy", policy, "--num-instances", str(NUM_FULL)]
            words += ["--memory-instances", str(num_memory)] if num_memory else []
            run_loong("simulate", [*words, "--decision-log", str(log)], Path(folder) / "run")
            lines = read_log(log)
            found = counts_of(lines, NUM_FULL)
            loans = loans_of(indexed(lines))
            found["tokens lent"] = sum(loan.num_lent_tokens for loan in loans)
            found["tokens returned"] = sum(loan.num_returned_tokens for loan in loans)
            runs.append({"command": shlex.join(["loong", "simulate", *words]), **found})
            rows.append((policy, " ".join(load), *(f"{found[name]:,}" for name in COUNTS)))
    print(table(("policy", "load", *COUNTS), rows))
    print_result("log_uses", {"command": shlex.join(["python", *sys.argv]), "runs": runs}, save=args.save)


if __name__ == "__main__":
    main()
