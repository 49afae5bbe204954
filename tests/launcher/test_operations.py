"""The claims of docs/operations.md about memory hold."""

from pathlib import Path

from loong.core.grammar import MASK_SECONDS_PER_TOKEN, MAX_MASK_SECONDS
from loong.observability import request_spans, timeline
from loong.observability.decision_log import recent, runs
from loong.server.metrics import request_observers, spans
from loong.server.structured import grammar_checker
from loong.worker.sampling import grammar_constraints as constraints
from loong.worker.sampling import mask_processes

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
LIMITS = PAGE.split("\n## Limits\n")[1].split("\n## ")[0]
TABLE = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.split("\n## Memory\n")[1].split("\n## ")[0].splitlines()
    if line.startswith("|")
]


def test_the_limits_of_grammars_are_those_that_hold() -> None:
    at_once, per_token = f"{MAX_MASK_SECONDS:g} s", f"{MASK_SECONDS_PER_TOKEN * 1000:g} ms a token"
    assert f"|{at_once} at once; {at_once} and {per_token} in all|" in LIMITS


def row(start: str) -> str:
    """Return the row of the table for kept data, with its bound."""
    (found,) = (cells for cells in TABLE if cells[0].startswith(start))
    return f"{found[0]}: {found[2]}"


def test_every_bound_is_the_one_that_holds() -> None:
    assert row("the last decisions").endswith(f": {recent.MAX_BYTES >> 20} MiB")
    assert row("the last batches").endswith(f": {timeline.MAX_BATCH_BYTES >> 20} MiB")
    assert row("the last moves").endswith(f": {timeline.MAX_MOVE_BYTES >> 20} MiB")
    assert row("when the last requests").endswith(f": {request_spans.MAX_SPAN_BYTES >> 20} MiB")
    assert f": {constraints.MAX_BYTES >> 20} MiB" in row("the grammars")
    assert f"last {request_observers.MAX_OVER} requests, each with its last {runs.MAX_DOPS} changes" in row(
        "the last 5"
    )
    assert f"{spans.MAX_PARENTS:,} headers" in row("with `--otlp")
    assert f"at most {spans.MAX_TRACEPARENT} characters" in row("with `--otlp")
    assert f"last {grammar_checker.MAX_KNOWN:,} grammars" in row("which of the last")
    assert f": {mask_processes.MAX_MATCHERS:,} of them" in row("how far outputs")
