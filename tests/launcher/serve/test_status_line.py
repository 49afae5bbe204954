"""The status line of a server."""

from snapshots import waiting

from loong.core.instance import ElasticInstance, InstanceKind
from loong.core.snapshot import ClusterStats, Snapshot
from loong.launcher.serve.status_line import status_line


def test_the_line_reports_what_happened_in_between() -> None:
    instances = (ElasticInstance(0, 1, InstanceKind.FULL, 100, kv_used=25),)
    before = Snapshot(10.0, instances, stats=ClusterStats(num_output_tokens=5, num_batches_by_dop={1: 3}))
    stats = ClusterStats(num_computed_tokens=400, num_output_tokens=25, num_batches_by_dop={1: 3, 4: 2})
    line = status_line(before, Snapshot(20.0, instances, stats=stats))
    assert line == (
        "40 tokens/s computed, 2 tokens/s out; 0 running, 0 waiting; KV 25.0 % used; batches by DoP 4:2"
    )


def test_a_batch_that_goes_on_is_no_new_one() -> None:
    instances = (ElasticInstance(0, 1, InstanceKind.FULL, 100),)
    stats = ClusterStats(num_output_tokens=5, num_batches_by_dop={1: 3})
    line = status_line(Snapshot(10.0, instances, stats=stats), Snapshot(20.0, instances, stats=stats))
    assert line.endswith("; no new batch")


def test_what_was_cached_and_who_waits_for_a_prefix_are_counted() -> None:
    instances = (ElasticInstance(0, 1, InstanceKind.FULL, 100, kv_cached=25),)
    now = Snapshot(20.0, instances, stats=ClusterStats(num_cached_tokens=70), following=(waiting("r", 5),))
    line = status_line(Snapshot(10.0, instances), now)
    assert line.startswith("0 tokens/s computed, 7 tokens/s from the prefix cache, 0 tokens/s out; ")
    assert "; 0 running, 1 waiting; KV 0.0 % used; " in line
