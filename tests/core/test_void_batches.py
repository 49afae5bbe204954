"""Laws of the batches that a lost instance makes void."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from loong.core.instance import ESPGroup
from loong.core.instructions import ExtendLease, MoveKV, ReleaseKV, StopLease
from loong.core.placement import KVSegment
from loong.core.plan import KVMigration
from loong.core.void_batches import BatchParts, is_void, void_batches

INSTANCE_IDS = st.integers(0, 5)
LOST = st.frozensets(INSTANCE_IDS, max_size=3)
NAMED = st.frozensets(st.integers(1, 12), max_size=3)


@st.composite
def batches(draw: st.DrawFn) -> list[BatchParts]:
    """Return batches in the order of their ids, of few instances and requests."""
    ids = sorted(draw(st.sets(st.integers(1, 12))))
    return [
        BatchParts(
            batch_id,
            tuple(draw(st.sets(INSTANCE_IDS, min_size=1, max_size=3))),
            tuple(draw(st.sets(st.sampled_from("abcdefgh"), max_size=3))),
        )
        for batch_id in ids
    ]


def causes(batch: BatchParts, earlier: Sequence[BatchParts], lost: frozenset[int], named: set[int]) -> bool:
    """Return whether a batch is void, given the void batches that are `earlier` in the order."""
    is_hit = batch.batch_id in named or bool(lost & {*batch.participant_ids})
    return is_hit or any({*batch.request_ids} & {*other.request_ids} for other in earlier)


@given(batches(), LOST, NAMED)
def test_a_batch_is_void_if_and_only_if_it_is_hit_or_shares_a_request_with_a_void_one_before_it(
    in_flight: list[BatchParts], lost: frozenset[int], named: frozenset[int]
) -> None:
    void_ids = void_batches(in_flight, lost, named)
    for number, batch in enumerate(in_flight):
        earlier = [other for other in in_flight[:number] if other.batch_id in void_ids]
        assert (batch.batch_id in void_ids) == causes(batch, earlier, lost, {*named})


@given(batches(), LOST, NAMED)
def test_naming_the_void_batches_makes_no_more_void(
    in_flight: list[BatchParts], lost: frozenset[int], named: frozenset[int]
) -> None:
    void_ids = void_batches(in_flight, lost, named)
    assert void_batches(in_flight, lost, void_ids) == void_ids
    assert void_batches(in_flight, frozenset(), void_ids) == void_ids


@given(batches(), LOST, LOST, NAMED, NAMED)
def test_more_losses_and_more_names_never_save_a_batch(
    in_flight: list[BatchParts],
    lost: frozenset[int],
    also_lost: frozenset[int],
    named: frozenset[int],
    also_named: frozenset[int],
) -> None:
    fewer = void_batches(in_flight, lost, named)
    assert {*fewer} <= {*void_batches(in_flight, lost | also_lost, named | also_named)}


@given(batches(), LOST, LOST)
def test_losses_one_after_the_other_and_together_make_the_same_batches_void(
    in_flight: list[BatchParts], first: frozenset[int], second: frozenset[int]
) -> None:
    together = void_batches(in_flight, first | second)
    assert void_batches(in_flight, second, void_batches(in_flight, first)) == together


@given(batches(), LOST, NAMED, st.integers(0, 12))
def test_void_batches_keep_their_order_and_no_later_batch_changes_them(
    in_flight: list[BatchParts], lost: frozenset[int], named: frozenset[int], length: int
) -> None:
    void_ids = void_batches(in_flight, lost, named)
    assert list(void_ids) == [batch.batch_id for batch in in_flight if batch.batch_id in void_ids]
    before = void_batches(in_flight[:length], lost, named)
    assert before == tuple(void_ids[: len(before)])
    assert not {*void_ids[len(before) :]} & {batch.batch_id for batch in in_flight[:length]}


@given(batches(), st.frozensets(st.integers(13, 20)))
def test_nothing_is_void_without_a_loss_or_a_name_of_a_batch_in_flight(
    in_flight: list[BatchParts], named: frozenset[int]
) -> None:
    assert void_batches(in_flight, frozenset(), named) == ()
    assert void_batches([], frozenset({1}), named) == ()


def test_nothing_of_a_void_batch_and_no_move_of_a_lost_instance_is_carried_out() -> None:
    group, lost, void = ESPGroup((0, 1)), frozenset({1}), {7}
    assert is_void(StopLease(7, group, 3), lost, void)
    assert is_void(ExtendLease(7, group, 30), lost, void)
    assert not is_void(StopLease(8, group, 3), lost, void)
    for source_id, destination_id, expected in ((0, 1, True), (1, 0, True), (0, 2, False)):
        migration = KVMigration(KVSegment("a", range(4), source_id), destination_id)
        assert is_void(MoveKV(9, migration, during_batch_id=7), lost, void) == expected
    assert not is_void(ReleaseKV("a", (1,)), lost, void)
