from dataclasses import replace
from typing import Any

import pytest
from plans import decode
from snapshots import decoding, snapshot_of

from loong.core.check_plan import check_plan
from loong.core.errors import InvalidPlanError
from loong.core.instance import MAX_SERVED_TOKENS, ElasticInstance, ESPGroup, InstanceKind, Service
from loong.core.placement import BorrowedKV, InstanceId, KVSegment, Placement, striped
from loong.core.plan import (
    BatchPlan,
    Eviction,
    IterationPlan,
    KVMigration,
    LeaseEnd,
    LeaseExtension,
    Preemption,
    QueryBlock,
    Transfer,
)
from loong.core.positions import stripe
from loong.core.request import RequestView
from loong.core.snapshot import RunningBatch, Snapshot

FULL, ATTENTION, HOST = InstanceKind.FULL, InstanceKind.ATTENTION, InstanceKind.HOST


def view(
    request_id: str,
    num_prompt: int,
    num_output: int = 0,
    max_tokens: int = 20,
    placement: Placement | None = None,
    batch_id: int | None = None,
) -> RequestView:
    return RequestView(
        request_id, num_prompt, num_output, max_tokens, 0.0, None, placement or Placement(), batch_id
    )


def segment(owner_id: str, positions: range, instance_id: InstanceId) -> KVSegment:
    return KVSegment(owner_id, positions, instance_id)


def striped_chunk(request_id: str, chunk: range, masters: tuple[InstanceId, ...]) -> BatchPlan:
    blocks = (
        QueryBlock(request_id, stripe(chunk, i, len(masters)), m, Transfer.KV) for i, m in enumerate(masters)
    )
    return BatchPlan(ESPGroup(masters), tuple(blocks), striped(request_id, chunk, masters).segments)


RUNNING = striped_chunk("busy", range(6), (6,))
SNAPSHOT = Snapshot(
    now=0.0,
    instances=(
        ElasticInstance(0, 1, FULL, 100, kv_used=14),
        ElasticInstance(1, 1, FULL, 100, kv_used=4),
        ElasticInstance(2, 1, FULL, 100),
        ElasticInstance(3, 1, ATTENTION, 100),
        ElasticInstance(4, 2, HOST, 100),
        ElasticInstance(5, 2, FULL, 100),
        ElasticInstance(6, 1, FULL, 100, kv_used=6, batch_id=9),
    ),
    waiting=(view("new", 10), view("huge", 300)),
    running=(
        view("old", 8, 2, placement=striped("old", range(9), (0, 1))),  # decoding, 18 tokens to go
        view("short", 9, 1, max_tokens=4, placement=striped("short", range(9), (0,))),  # 3 to go
        view("busy", 6, batch_id=9),
    ),
    batches=(RunningBatch(9, RUNNING, 0.0, num_steps_taken=3, last_step=8, stepped_at=0.0),),
)

PREFILL = striped_chunk("new", range(10), (2, 1))
LEASE = BatchPlan(
    ESPGroup((0, 1)),
    (
        QueryBlock("old", range(9, 10), 1, Transfer.QUERY),
        QueryBlock("short", range(9, 10), 0, Transfer.QUERY),
    ),
    (segment("old", range(9, 17), 1), segment("short", range(9, 12), 0)),  # short leaves after 3 steps
    num_steps=8,
)
MOVE = KVMigration(segment("old", range(0, 9, 4), 0), 2)
DROP = Eviction(segment("old", range(1, 7, 2), 1))


def refused(plan: IterationPlan | BatchPlan, message: str) -> None:
    plan = IterationPlan((plan,)) if isinstance(plan, BatchPlan) else plan
    with pytest.raises(InvalidPlanError, match=message):
        check_plan(SNAPSHOT, plan)


def with_query(batch: BatchPlan, index: int, **changes: object) -> BatchPlan:
    queries = list(batch.queries)
    queries[index] = queries[index]._replace(**changes)  # type: ignore[arg-type]  # names differ in type
    return replace(batch, queries=tuple(queries))


OFF_MASTER = replace(LEASE, writes=(segment("old", range(9, 17), 0), LEASE.writes[1]))
LEAVING_MASTER = replace(
    LEASE, writes=(segment("old", range(9, 13), 1), segment("old", range(13, 17), 0), LEASE.writes[1])
)
RETAINED = replace(PREFILL, writes=(segment("new", range(10), 1),))
PUSHED_TO_MEMORY = BatchPlan(
    ESPGroup((2,)), (QueryBlock("new", range(10), 2, Transfer.QUERY),), (segment("new", range(10), 3),)
)


@pytest.mark.parametrize(
    "plan",
    [
        IterationPlan(),
        IterationPlan((PREFILL,)),
        IterationPlan((RETAINED,)),
        IterationPlan((PUSHED_TO_MEMORY,)),
        IterationPlan((LEASE,)),
        IterationPlan((striped_chunk("new", range(10), (2,)), LEASE)),
        IterationPlan(migrations=(MOVE, KVMigration(segment("old", range(1, 9, 2), 1), 4))),
        IterationPlan((striped_chunk("huge", range(100), (1, 2)),), preemptions=(Preemption("old"),)),
        IterationPlan(migrations=(MOVE,), evictions=(DROP,)),
        IterationPlan((striped_chunk("huge", range(198), (1, 2)),), evictions=(DROP,)),
        IterationPlan(lease_ends=(LeaseEnd(9, 4),)),
    ],
)
def test_a_plan_that_keeps_the_rules_passes(plan: IterationPlan) -> None:
    check_plan(SNAPSHOT, plan)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            with_query(PREFILL, 0, positions=range(0)),
            r"'new', .*master_id=2.* has positions range\(0, 0\): none",
        ),
        (with_query(PREFILL, 0, positions=range(8, -1, -2)), "descending"),
        (replace(PREFILL, writes=(*PREFILL.writes, segment("new", range(3, 3), 1))), "none"),
        (IterationPlan(migrations=(KVMigration(segment("old", range(0), 0), 2),)), "none"),
        (IterationPlan(evictions=(Eviction(segment("old", range(0), 0)),)), "none"),
    ],
)
def test_every_range_has_a_position_and_ascends(plan: IterationPlan | BatchPlan, message: str) -> None:
    refused(plan, message)


@pytest.mark.parametrize(
    ("masters", "message"),
    [
        ((2, 7), "instance 7, which does not exist"),
        ((2, 4), "instance 4 is a host tier"),
        ((2, 3), "instance 3 has no weights and runs no batch"),
        ((2, 6), "instance 6 is running batch 9"),
    ],
)
def test_a_group_is_of_idle_instances_that_compute(masters: tuple[int, ...], message: str) -> None:
    refused(striped_chunk("new", range(10), masters), message)


def test_an_instance_gets_one_batch_a_plan() -> None:
    batches = (striped_chunk("new", range(10), (2,)), striped_chunk("huge", range(10), (2,)))
    refused(IterationPlan(batches), "instance 2 is given two batches")


def test_kv_is_not_shared_between_instances_of_different_tp_size() -> None:
    refused(striped_chunk("new", range(10), (2, 5)), r"\(2, 5\) have tp sizes \[1, 2\]")
    refused(IterationPlan(migrations=(replace(MOVE, destination_id=5),)), r"\(0, 5\) have tp sizes \[1, 2\]")


def test_a_request_is_named_once_a_plan() -> None:
    refused(
        IterationPlan((striped_chunk("new", range(5), (2,)), striped_chunk("new", range(5), (1,)))),
        "request new is planned 2 times",
    )
    refused(IterationPlan((LEASE,), (MOVE,), (Preemption("old"),)), "request old is planned 2 times")
    refused(IterationPlan(preemptions=(Preemption("new"), Preemption("new"))), "new is planned 2 times")


def test_kv_of_before_a_batch_may_move_while_the_batch_reads_it() -> None:
    check_plan(SNAPSHOT, IterationPlan((LEASE,), (MOVE,)))


def test_nothing_is_preempted_that_has_no_kv() -> None:
    refused(IterationPlan(preemptions=(Preemption("new"),)), "request new is to be preempted, but has no KV")


def test_only_live_requests_at_rest_are_planned() -> None:
    refused(striped_chunk("gone", range(10), (2,)), "request gone, which is not live")
    refused(IterationPlan(preemptions=(Preemption("busy"),)), "request busy is in batch 9")
    refused(
        IterationPlan(migrations=(KVMigration(segment("gone", range(1), 0), 1),)),
        "request gone, which is not",
    )


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (BatchPlan(ESPGroup((2,)), (), ()), r"group \(2,\) has no queries"),
        (striped_chunk("new", range(11), (2,)), "new is to compute 11 tokens, but 10 are uncomputed"),
        (striped_chunk("new", range(2, 6), (2,)), "new are not positions 0 to 3, each once"),
        (with_query(PREFILL, 1, positions=range(0, 10, 2)), "new are not positions 0 to 9, each once"),
        (with_query(PREFILL, 1, transfer=Transfer.QUERY), "new moves both KV and queries"),
        (with_query(PREFILL, 1, master_id=2), "new has two blocks at one master"),
        (with_query(PREFILL, 1, master_id=0), r"master 0 is not in group \(2, 1\)"),
    ],
)
def test_queries_are_the_next_positions_each_at_one_master(batch: BatchPlan, message: str) -> None:
    refused(batch, message)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (replace(LEASE, num_steps=0), "at least 1 step, not 0"),
        (replace(PREFILL, num_steps=4), "new is to take a lease of 4 steps with 10 uncomputed"),
        (with_query(LEASE, 0, transfer=Transfer.KV), "old is to take a lease of 8 steps .* moving kv"),
    ],
)
def test_only_decode_tokens_whose_queries_travel_take_a_lease(batch: BatchPlan, message: str) -> None:
    refused(batch, message)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (replace(PREFILL, writes=PREFILL.writes[:1]), "writes of request new are not positions 0 to 9"),
        (replace(PREFILL, writes=PREFILL.writes * 2), "writes of request new are not positions 0 to 9"),
        (
            replace(LEASE, writes=(segment("old", range(9, 17), 2), LEASE.writes[1])),
            r"instance 2 .* not in group",
        ),
        (replace(PREFILL, writes=(*PREFILL.writes, segment("old", range(9, 10), 1))), "KV of .*old"),
        (
            replace(PREFILL, writes=(segment("new", range(10), 99),)),
            r"names what does not exist: KeyError\(99\)",
        ),
        (OFF_MASTER, "stored where it is not made"),
        (LEAVING_MASTER, "stored where it is not made"),
        (
            replace(LEASE, writes=(LEASE.writes[0], segment("short", range(9, 17), 0))),
            "writes of request short are not positions 9 to 11",
        ),
        (
            replace(LEASE, writes=(segment("old", range(9, 10), 1), LEASE.writes[1])),
            "writes of request old are not positions 9 to 16",
        ),
    ],
)
def test_every_new_token_is_stored_once_where_it_can_be(batch: BatchPlan, message: str) -> None:
    refused(batch, message)


def test_kv_that_stays_is_stored_by_the_master_that_makes_it() -> None:
    stays = replace(
        PREFILL, queries=tuple(block._replace(transfer=Transfer.QUERY) for block in PREFILL.queries)
    )
    check_plan(SNAPSHOT, IterationPlan((stays,)))
    swapped = replace(stays, writes=striped("new", range(10), (1, 2)).segments)
    refused(swapped, "stored where it is not made")


def test_a_decode_block_cut_as_a_stripe_takes_a_lease_too() -> None:
    check_plan(SNAPSHOT, IterationPlan((with_query(LEASE, 0, positions=stripe(range(9, 10), 0, 5)),)))


def decode_elsewhere(master_id: InstanceId, num_steps: int = 1) -> BatchPlan:
    """Return the next tokens of a request whose KV is on instance 0, on another."""
    block = QueryBlock("old", range(9, 10), master_id, Transfer.QUERY)
    new_kv = segment("old", range(9, 9 + num_steps), master_id)
    return BatchPlan(ESPGroup((master_id,)), (block,), (new_kv,), num_steps=num_steps)


def test_kv_outside_the_group_is_met_by_queries_alone() -> None:
    check_plan(SNAPSHOT, IterationPlan((decode_elsewhere(1),)))
    batch = striped_chunk("old", range(9, 10), (1,))
    refused(batch, r"old has KV on instances \[0\], outside group \(1,\), and is to move its KV")
    refused(decode_elsewhere(5), r"KV on instance 0, outside it, with tp size 1; .* have 2")


@pytest.mark.parametrize("change", [{"serves": Service.NONE}, {"kind": HOST}])
def test_an_instance_that_does_not_serve_holds_kv_of_its_own_batches_only(change: dict[str, Any]) -> None:
    snapshot = snapshot_with_holder(**change)
    with pytest.raises(InvalidPlanError, match=r"instance 0, outside it, which does not serve"):
        check_plan(snapshot, IterationPlan((decode_elsewhere(1),)))


def test_gpus_serve_groups_of_their_own_host_only() -> None:
    snapshot = snapshot_with_holder(serves=Service.OWN_HOST, host_id=1)
    with pytest.raises(InvalidPlanError, match=r"serves only its own host; members \[1\] are on others"):
        check_plan(snapshot, IterationPlan((decode_elsewhere(1),)))
    check_plan(snapshot_with_holder(host_id=1), IterationPlan((decode_elsewhere(1),)))


def test_processors_keep_kv_for_gpus_and_serve_each_other() -> None:
    on_processors = snapshot_with_holder(serves=Service.ALL)
    check_plan(on_processors, IterationPlan((decode_elsewhere(1),)))
    member, *others = on_processors.instances[1:]
    instances = (on_processors.instances[0], replace(member, is_on_gpu=True), *others)
    message = r"memory of the host, and members \[1\] with KV in memory of GPUs: no step on GPUs can wait"
    with pytest.raises(InvalidPlanError, match=message):
        check_plan(replace(on_processors, instances=instances), IterationPlan((decode_elsewhere(1),)))


def snapshot_with_holder(**change: Any) -> Snapshot:
    """Return the snapshot with a changed instance 0, which holds KV outside groups of instance 1."""
    return replace(SNAPSHOT, instances=(replace(SNAPSHOT.instances[0], **change), *SNAPSHOT.instances[1:]))


def test_the_lists_of_a_served_lease_have_room_for_a_few_times_the_kv_of_an_instance() -> None:
    snapshot = snapshot_with_holder(serves=Service.OWN_HOST, kv_capacity=1, kv_used=1)
    with pytest.raises(InvalidPlanError, match=r"lists the KV of 5 tokens on instance 0; 4 can be"):
        check_plan(snapshot, IterationPlan((decode_elsewhere(1, num_steps=2),)))


@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_served_lease_has_a_bounded_number_of_tokens_a_master(num_steps: int) -> None:
    views = [decoding(f"r{number}", 2, (0,)) for number in range(MAX_SERVED_TOKENS + 1)]
    snapshot = snapshot_of([2000] * 2, views)
    instances = tuple(replace(instance, serves=Service.OWN_HOST) for instance in snapshot.instances)
    snapshot = replace(snapshot, instances=instances)
    most, more = (
        IterationPlan((decode(some, (1,), dict.fromkeys(snapshot.request, 1), num_steps=num_steps),))
        for some in (views[1:], views)
    )
    check_plan(snapshot, most)
    if num_steps == 1:
        check_plan(snapshot, more)
    else:
        message = f"has {MAX_SERVED_TOKENS + 1} tokens of a master; {MAX_SERVED_TOKENS} can be"
        with pytest.raises(InvalidPlanError, match=message):
            check_plan(snapshot, more)


@pytest.mark.parametrize("most", [1, 3])
def test_an_instance_serves_leases_up_to_its_number_and_any_steps(most: int) -> None:
    snapshot = snapshot_with_holder(serves=Service.OWN_HOST, max_served_leases=most)
    lease, step = decode_elsewhere(1, num_steps=2), decode_elsewhere(1)
    check_plan(snapshot, IterationPlan((lease,)))
    running = replace(snapshot.batches[0], holder_ids=(0,))
    leases = [replace(running, batch_id=90 + number, plan=lease) for number in range(most)]
    check_plan(replace(snapshot, batches=tuple(leases[1:])), IterationPlan((lease,)))
    full = replace(snapshot, batches=tuple(leases))
    assert [before.takes_lease(0) for before in (snapshot, full)] == [True, False]
    check_plan(full, IterationPlan((step,)))
    message = rf"which instance 0 serves, comes while that serves {most} others; {most} can be served"
    with pytest.raises(InvalidPlanError, match=message):
        check_plan(full, IterationPlan((lease,)))
    stepping = replace(snapshot, batches=tuple(replace(batch, plan=step) for batch in leases))
    check_plan(stepping, IterationPlan((lease,)))


def test_a_holder_that_runs_a_batch_of_its_own_serves_too() -> None:
    busy = SNAPSHOT.instances[0].running(9)
    snapshot = replace(SNAPSHOT, instances=(busy, *SNAPSHOT.instances[1:]))
    check_plan(snapshot, IterationPlan((decode_elsewhere(1),)))


@pytest.mark.parametrize(
    ("migrations", "message"),
    [
        ((replace(MOVE, destination_id=7),), "instance 7: no such"),
        ((KVMigration(segment("old", range(2), 0), 2),), "is to be moved, but is not there"),
        ((KVMigration(segment("old", range(0, 9, 2), 7), 2),), "is to be moved, but is not there"),
        ((MOVE, KVMigration(segment("old", range(0, 9, 2), 0), 1)), "of old are to be moved twice"),
    ],
)
def test_what_moves_is_where_it_says_and_goes_to_one_place(
    migrations: tuple[KVMigration, ...], message: str
) -> None:
    refused(IterationPlan(migrations=migrations), message)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            IterationPlan(evictions=(Eviction(segment("old", range(1, 7, 2), 0)),)),
            "evicted, but is not there",
        ),
        (IterationPlan(evictions=(DROP, DROP)), r"range\(1, 7, 2\) of old are to be evicted, and again"),
        (
            IterationPlan(migrations=(MOVE,), evictions=(Eviction(MOVE.segment),)),
            "evicted, and again or moved",
        ),
        (IterationPlan((LEASE,), evictions=(DROP,)), "request old is planned 2 times"),
        (
            IterationPlan(preemptions=(Preemption("old"),), evictions=(DROP,)),
            "request old is planned 2 times",
        ),
        (IterationPlan(evictions=(Eviction(segment("busy", range(6), 6)),)), "request busy is in batch 9"),
    ],
)
def test_only_kv_at_rest_is_evicted_and_only_once(plan: IterationPlan, message: str) -> None:
    refused(plan, message)


def test_no_kv_of_a_request_whose_batch_is_ending_is_evicted() -> None:
    ending = (RunningBatch(8, LEASE, 0.0, num_steps_taken=8, last_step=8, stepped_at=0.0),)
    with pytest.raises(InvalidPlanError, match="its request's batch is still to end"):
        check_plan(replace(SNAPSHOT, ending=ending), IterationPlan(evictions=(DROP,)))


def test_what_is_to_be_stored_fits_what_is_free() -> None:
    refused(striped_chunk("huge", range(101), (2,)), "instance 2 is to store 101 tokens but has room for 100")
    refused(
        striped_chunk("huge", range(200), (1, 2)), "instance 1 is to store 100 tokens but has room for 96"
    )
    full = IterationPlan((striped_chunk("huge", range(198), (1, 2)),), (MOVE,))
    refused(full, "instance 1 is to store 99 tokens but has room for 96")
    refused(
        IterationPlan((striped_chunk("huge", range(202), (1, 2)),), preemptions=(Preemption("old"),)),
        "to store 101 tokens but has room for 100",
    )


def test_a_request_that_goes_frees_nothing_that_others_read_too() -> None:
    old = SNAPSHOT.request["old"]
    sharing = replace(old, borrowed=(BorrowedKV("kv", striped("old", range(8), (0, 1))),))
    snapshot = replace(SNAPSHOT, running=(sharing, *SNAPSHOT.running[1:]))
    preemption = (Preemption("old"),)
    check_plan(SNAPSHOT, IterationPlan((striped_chunk("huge", range(100), (1,)),), preemptions=preemption))
    plan = IterationPlan((striped_chunk("huge", range(97), (1,)),), preemptions=preemption)
    with pytest.raises(InvalidPlanError, match="instance 1 is to store 97 tokens but has room for 96"):
        check_plan(snapshot, plan)
    plan = replace(plan, preemptions=(), evictions=(DROP,))
    check_plan(SNAPSHOT, plan)
    with pytest.raises(InvalidPlanError, match="instance 1 is to store 97 tokens but has room for 96"):
        check_plan(snapshot, plan)


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (LeaseEnd(8, 4), "batch 8 is to end, but it is not running"),
        (LeaseEnd(9, 3), "before step 3, but has taken 3 of 8 steps"),
        (LeaseEnd(9, 9), "before step 9, but has taken 3 of 8 steps"),
    ],
)
def test_a_lease_ends_at_a_step_that_may_still_come(end: LeaseEnd, message: str) -> None:
    refused(IterationPlan(lease_ends=(end,)), message)


def test_a_lease_ends_once() -> None:
    refused(IterationPlan(lease_ends=(LeaseEnd(9, 4), LeaseEnd(9, 8))), "batch 9 is to end twice")


IN_LEASE = replace(
    SNAPSHOT,
    instances=(
        ElasticInstance(0, 1, FULL, 100, kv_used=17, batch_id=7),
        ElasticInstance(1, 1, FULL, 20, kv_used=12, batch_id=7),
    ),
    running=tuple(replace(view, batch_id=7) for view in SNAPSHOT.running[:2]),
    batches=(RunningBatch(7, LEASE, 0.0, num_steps_taken=3, last_step=8, stepped_at=0.0),),
)


def in_lease(**changes: object) -> Snapshot:
    """With another lease."""
    running = RunningBatch(7, LEASE, 0.0, num_steps_taken=3, last_step=8, stepped_at=0.0)
    return replace(IN_LEASE, batches=(replace(running, **changes),))  # type: ignore[arg-type]  # as above


def test_a_lease_goes_on_where_its_master_has_room() -> None:
    """Of the two requests one is over before, and needs none."""
    check_plan(IN_LEASE, IterationPlan(lease_extensions=(LeaseExtension(7, 16),)))
    with pytest.raises(InvalidPlanError, match="instance 1 is to store 9 tokens but has room for 8"):
        check_plan(IN_LEASE, IterationPlan(lease_extensions=(LeaseExtension(7, 17),)))


def test_a_lease_goes_on_for_no_more_tokens_than_its_requests_may_have() -> None:
    (extended,) = (IN_LEASE.extended(LeaseExtension(7, 99)),)
    assert extended.num_stored_tokens == {1: 18, 0: 3}
    assert (extended.num_steps, extended.queries) == (99, LEASE.queries)


@pytest.mark.parametrize(
    ("snapshot", "extensions", "message"),
    [
        (IN_LEASE, [LeaseExtension(6, 10)], "batch 6 is to go on, but is no lease"),
        (SNAPSHOT, [LeaseExtension(9, 10)], "batch 9 is to go on, but is no lease"),  # of one step
        (in_lease(last_step=7), [LeaseExtension(7, 10)], "batch 7 is to go on, but is no lease"),
        (in_lease(num_steps_taken=7), [LeaseExtension(7, 10)], "batch 7 is to go on, but is no lease"),
        (IN_LEASE, [LeaseExtension(7, 8)], "to be extended to 8 steps, but has 8"),
        (IN_LEASE, [LeaseExtension(7, 9), LeaseExtension(7, 10)], "given two ends at once"),
    ],
)
def test_only_leases_that_nobody_ends_go_on_while_there_is_time_to_report(
    snapshot: Snapshot, extensions: list[LeaseExtension], message: str
) -> None:
    with pytest.raises(InvalidPlanError, match=message):
        check_plan(snapshot, IterationPlan(lease_extensions=tuple(extensions)))


def test_a_lease_is_not_ended_and_extended_at_once() -> None:
    plan = IterationPlan(lease_ends=(LeaseEnd(7, 5),), lease_extensions=(LeaseExtension(7, 10),))
    with pytest.raises(InvalidPlanError, match="given two ends at once"):
        check_plan(IN_LEASE, plan)


HOLED = view("holed", 16, 2, placement=striped("holed", range(17), (0, 1, 2, 5)).without(5))
REPAIR_BLOCKS = (
    QueryBlock("holed", range(3, 16, 8), 0, Transfer.QUERY),
    QueryBlock("holed", range(7, 16, 8), 1, Transfer.QUERY),
    QueryBlock("holed", range(17, 18), 1, Transfer.QUERY),
)
ALIVE = replace(SNAPSHOT, running=(HOLED,), waiting=(), batches=())


def repair(*blocks: QueryBlock, group: tuple[InstanceId, ...] = (0, 1, 2), num_steps: int = 1) -> BatchPlan:
    writes = tuple(KVSegment(b.request_id, b.positions, b.master_id) for b in blocks)
    return BatchPlan(ESPGroup(group), blocks, writes, num_steps)


@pytest.mark.parametrize("num_blocks", [2, 3])
def test_a_batch_computes_just_what_is_missing_and_goes_on(num_blocks: int) -> None:
    check_plan(ALIVE, IterationPlan((repair(*REPAIR_BLOCKS[:num_blocks]),)))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            repair(QueryBlock("holed", range(3), 0, Transfer.QUERY)),
            "holed is to compute positions 0 again, which are on instance 0",
        ),
        (
            repair(*REPAIR_BLOCKS[1:]),
            "queries of request holed are not positions 3 to 11 in steps of 4, each once",
        ),
        (repair(REPAIR_BLOCKS[2]), "queries of request holed are not positions 3, each once"),
        (
            replace(repair(*REPAIR_BLOCKS), writes=(KVSegment("holed", range(3, 18), 0),)),
            "writes of request holed are not positions 3 to 15 in steps of 4 and 17, each once",
        ),
        (
            repair(QueryBlock("holed", range(3, 4), 0, Transfer.QUERY), num_steps=2),
            "holed is to take a lease of 2 steps, but lacks positions 3 to 15 in steps of 4",
        ),
        (
            replace(repair(*REPAIR_BLOCKS[:2]), writes=(KVSegment("holed", range(3, 16, 4), 0),)),
            "is stored where it is not made",
        ),
    ],
)
def test_nothing_is_computed_again_or_before_what_comes_first(batch: BatchPlan, message: str) -> None:
    with pytest.raises(InvalidPlanError, match=message):
        check_plan(ALIVE, IterationPlan((batch,)))
