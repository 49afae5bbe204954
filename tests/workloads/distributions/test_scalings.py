"""Scale-ups and scale-downs, read from what ran."""

from loong.core.cluster_history import BatchSlice, ClusterHistory
from loong.core.instance import ESPGroup
from loong.workloads.distributions.scalings import scalings_of


def batch(batch_id: int, group: tuple[int, ...], *request_ids: str) -> BatchSlice:
    return BatchSlice(batch_id, ESPGroup(group), "mixed", float(batch_id), batch_id + 1.0, request_ids, ())


def test_a_group_grows_beyond_all_that_its_requests_had_and_shrinks_below_the_most() -> None:
    batches = (
        batch(1, (0,), "a"),
        batch(2, (0, 1), "a", "b"),  # up: a had one
        batch(3, (2, 3, 4), "c"),  # the first of c
        batch(4, (0, 1), "a"),
        batch(5, (0, 1, 2), "a", "c"),  # as many as c had
        batch(6, (2,), "c"),  # down
    )
    found = scalings_of(ClusterHistory(tuple(reversed(batches))))
    assert [(one.batch.batch_id, one.is_up) for one in found] == [(2, True), (6, False)]
