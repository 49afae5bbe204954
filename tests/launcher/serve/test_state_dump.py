"""The log of the scheduler's state."""

from dataclasses import replace

from snapshots import decoding, running, snapshot_of, waiting

from loong.core.instance import ESPGroup
from loong.core.placement import KVSegment
from loong.core.plan import BatchPlan, KVMigration, QueryBlock, Transfer
from loong.launcher.serve.state_dump import MAX_LINES, described


def test_all_that_runs_and_waits_is_shown_with_its_age_and_tokens() -> None:
    view = decoding("a", 10, (0, 1), max_tokens=30, num_output=3)
    plan = BatchPlan(
        ESPGroup((0, 1)),
        (QueryBlock("a", range(12, 13), 0, Transfer.QUERY),),
        (KVSegment("a", range(12, 13), 0),),
        num_steps=4,
    )
    snapshot = snapshot_of(
        (64, 64), [view, waiting("b", 20, arrival_time=1.0)], [running(7, plan, 2.0)], now=5.5
    )
    came = "came 5.500 s ago"
    moved = KVMigration(KVSegment("c", range(5), 0), 1)
    assert described(replace(snapshot, migrations=(moved,))).splitlines() == [
        "1 waiting, 1 running; 1 batches and 1 migrations in flight; 5.500 s since the start",
        "  instance 0 (full): KV 7 of 64 tokens, batch 7",
        "  instance 1 (full): KV 6 of 64 tokens, batch 7",
        "  batch 7 on instances 0, 1: 1 requests, 0 of 4 steps, began 3.500 s ago, last step 3.500 s ago",
        "  migration of 5 tokens of c: instance 0 to 1",
        f"  running: a, 10 tokens of prompt, 3 of at most 30 of output, {came}, KV: 6 on 0, 6 on 1, batch 7",
        "  waiting: b, 20 tokens of prompt, 0 of at most 16 of output, came 4.500 s ago, KV: none",
    ]


def test_cached_kv_and_requests_that_wait_for_a_prefix_are_shown() -> None:
    snapshot = replace(snapshot_of((64,), [waiting("b", 20)]), following=(waiting("c", 5),))
    instance = replace(snapshot.instances[0], kv_cached=9)
    lines = described(replace(snapshot, instances=(instance,))).splitlines()
    assert lines[0].startswith("2 waiting, 0 running")
    assert lines[1] == "  instance 0 (full): KV 0 of 64 tokens, 9 more cached"
    assert lines[-1] == "  waiting for a prefix that another computes: c"


def test_no_more_lines_are_logged_of_ten_thousand_requests() -> None:
    views = [waiting(f"request-{number}", 5) for number in range(10_000)]
    *_, before, last = described(snapshot_of((64,), views)).splitlines()
    assert f"request-{MAX_LINES - 1}," in before
    assert last.strip() == f"... and {10_000 - MAX_LINES} more"
