"""A ring pass: each block comes by once, a query meets each key once, and each token stays in one place."""

from collections import Counter

import pytest
from attention_steps import EVERYONE, GivenStep, given_steps, sharing_steps
from hypothesis import given
from hypothesis import strategies as st

from loong.attention.attention_step import AttentionStep
from loong.attention.ring import RingLayout, kept_rows, own_rows, ring_layout
from loong.attention.ring_kv import RingKV
from loong.core.plan import Transfer
from loong.kernels.attend_task import AttendTask
from loong.model.device import CpuDevice

STEPS = given_steps() | sharing_steps()
KV_STEPS = given_steps((Transfer.KV,)) | sharing_steps((Transfer.KV,))

Row = dict[str, int]  # the position of its token in each request that reads it


def layouts_of(step: GivenStep) -> dict[int, tuple[AttentionStep, RingLayout]]:
    """Return the part of each member."""
    found = {}
    for instance_id in step.batch.group.instance_ids:
        own = step.on(instance_id)
        layout = ring_layout(own, CpuDevice())
        assert layout is not None
        found[instance_id] = own, layout
    return found


def tokens_in_block(own: AttentionStep, source_id: int) -> list[Row]:
    """Return the token of each row of an instance's block."""
    sent = RingKV.of(own, source_id)
    rows: list[Row] = [{} for _ in range(sent.num_rows)]
    for request_id in own.requests(Transfer.KV):
        for row, kv in sent.pieces(request_id):
            positions = [position for part in kv for position in part]
            for number, position in enumerate(positions, start=row):
                rows[number][request_id] = position
    return rows


def num_rows_of(own: AttentionStep, source_id: int) -> int:
    return RingKV.of(own, source_id).num_rows


def tasks_in(layout: RingLayout, ring_step: int) -> list[AttendTask]:
    return [
        AttendTask(*line)
        for table in layout.blocks[ring_step].tables[None]
        for line in table.turns[0].tolist()
    ]


@given(KV_STEPS)
def test_each_block_comes_by_once_on_each_member(step: GivenStep) -> None:
    group = step.batch.group
    for instance_id, (own, layout) in layouts_of(step).items():
        sources = [group.source_at(instance_id, ring_step) for ring_step in range(group.dop)]
        assert sorted(sources) == sorted(group.instance_ids)
        assert sources[0] == instance_id
        assert [block.num_tokens for block in layout.blocks] == [num_rows_of(own, s) for s in sources]


@given(KV_STEPS)
def test_a_block_that_leaves_is_the_one_that_the_next_member_expects(step: GivenStep) -> None:
    """So both ends of a ring step know its size without a message."""
    found, ring = layouts_of(step), step.batch.group.instance_ids
    for place, instance_id in enumerate(ring):
        _, layout = found[instance_id]
        _, following = found[ring[(place + 1) % len(ring)]]
        for ring_step in range(len(ring) - 1):
            assert layout.blocks[ring_step].num_tokens == following.blocks[ring_step + 1].num_tokens


@given(KV_STEPS)
def test_all_blocks_together_have_all_kv_once(step: GivenStep) -> None:
    own = step.on(step.batch.group.leader_id)
    rows = [row for source_id in step.batch.group.instance_ids for row in tokens_in_block(own, source_id)]
    tokens = [token for row in rows for token in row.items()]
    assert sorted(tokens) == sorted((r, p) for r, known in step.known.items() for p in known)
    places = {
        (s.owner_id, p, s.instance_id) for r in step.placements.values() for s in r.shared for p in s[1]
    }
    num_shared = sum(len(s.positions) for r in step.placements.values() for s in r.shared)
    assert len(rows) == len(tokens) - num_shared + len(places)


@given(STEPS)
def test_history_and_new_kv_are_the_rows_of_the_own_block_and_what_stays_is_behind(step: GivenStep) -> None:
    for instance_id in step.batch.group.instance_ids:
        own = step.on(instance_id)
        rows = own_rows(own, RingKV.of(own, instance_id))
        num_rows, num_stored = num_rows_of(own, instance_id), len(rows.rows_to_store)
        written = sorted([*rows.history_rows.tolist(), *rows.new_rows.tolist()])
        assert written == list(range(num_rows + num_stored))
        assert rows.rows_to_store.tolist() == list(range(num_rows, num_rows + num_stored))


@given(STEPS)
def test_history_is_copied_from_its_slots(step: GivenStep) -> None:
    for instance_id in step.batch.group.instance_ids:
        own = step.on(instance_id)
        rows = own_rows(own, RingKV.of(own, instance_id))
        tokens = tokens_in_block(own, instance_id)
        pairs = zip(rows.history_rows.tolist(), rows.history_slots.tolist(), strict=True)
        for row, slot in pairs:
            for request_id, position in tokens[row].items():
                assert own.store.slots(request_id, range(position, position + 1)).tolist() == [slot]


@given(STEPS)
def test_new_kv_has_the_row_of_its_token(step: GivenStep) -> None:
    for instance_id in step.batch.group.instance_ids:
        own = step.on(instance_id)
        tokens = tokens_in_block(own, instance_id)
        new_rows = own_rows(own, RingKV.of(own, instance_id)).new_rows.tolist()
        for block, rows in own.rows.items():
            if block.transfer is Transfer.KV:
                found = [tokens[row] for row in new_rows[rows]]
                assert found == [{block.request_id: position} for position in block.positions]
            else:
                assert all(row >= len(tokens) for row in new_rows[rows])


@given(KV_STEPS)
def test_each_query_meets_each_key_up_to_it_once_in_a_whole_pass(step: GivenStep) -> None:
    for instance_id, (own, layout) in layouts_of(step).items():
        met: Counter[tuple[str, int, int]] = Counter()
        queries = [(b.request_id, p) for b in own.blocks for p in b.positions]
        for ring_step in range(step.batch.group.dop):
            keys = tokens_in_block(own, step.batch.group.source_at(instance_id, ring_step))
            for task in tasks_in(layout, ring_step):
                for query in range(task.num_queries):
                    for key in range(task.num_keys):
                        is_seen = task.first_key + key * task.key_step <= (
                            task.first_query + query * task.query_step
                        )
                        if is_seen:
                            request_id, position = queries[task.query_row + query]
                            met[request_id, position, keys[task.key_row + key][request_id]] += 1
            if (table := layout.blocks[ring_step].shared) is not None:
                for task in [AttendTask(*line) for line in table.tasks.tolist()]:
                    first = task.query_row % len(table.rows)
                    for row in table.rows[first : first + task.num_queries].tolist():
                        for slot in table.slots[task.key_row : task.key_row + task.num_keys].tolist():
                            request_id, position = queries[row]
                            met[request_id, position, keys[slot][request_id]] += 1
        assert met == Counter((r, p, key) for r, p in queries for key in step.known[r] if key <= p)


@given(STEPS)
def test_what_stays_is_kept_by_the_instance_that_is_to_store_it_and_once(step: GivenStep) -> None:
    kept = []
    for instance_id in step.batch.group.instance_ids:
        own = step.on(instance_id)
        for source_id in step.batch.group.instance_ids:
            tokens = tokens_in_block(own, source_id)
            rows, slots = kept_rows(own, RingKV.of(own, source_id))
            for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
                ((request_id, position),) = tokens[row].items()
                assert own.store.slots(request_id, range(position, position + 1)).tolist() == [slot]
                kept.append((request_id, position, instance_id))
    travelling = step.on(step.batch.group.leader_id).requests(Transfer.KV)
    assert sorted(kept) == sorted(
        (segment.owner_id, position, segment.instance_id)
        for segment in step.batch.writes
        if segment.owner_id in travelling and segment.instance_id in step.batch.group.instance_ids
        for position in segment.positions
    )


@given(STEPS)
def test_no_slot_is_written_twice_in_a_pass(step: GivenStep) -> None:
    for instance_id in step.batch.group.instance_ids:
        own = step.on(instance_id)
        slots = [
            slot
            for i in step.batch.group.instance_ids
            for slot in kept_rows(own, RingKV.of(own, i))[1].tolist()
        ]
        assert len(set(slots)) == len(slots)


@given(STEPS)
def test_there_is_a_ring_only_where_kv_travels(step: GivenStep) -> None:
    travels = any(block.transfer is Transfer.KV for block in step.batch.queries)
    for instance_id in step.batch.group.instance_ids:
        assert (ring_layout(step.on(instance_id), CpuDevice()) is not None) == travels


@given(KV_STEPS)
def test_a_pass_that_is_not_merged_attends_each_query_in_one_call_at_most(step: GivenStep) -> None:
    for _, layout in layouts_of(step).values():
        calls = Counter(
            task.query_row + query
            for ring_step in range(len(layout.blocks))
            for task in tasks_in(layout, ring_step)
            for query in range(task.num_queries)
        )
        assert layout.is_merged(None) or max(calls.values(), default=1) == 1


@pytest.mark.parametrize("dop", range(1, 5))
@given(data=st.data())
def test_a_holder_outside_the_group_has_no_row_in_the_ring(dop: int, data: st.DataObject) -> None:
    step = data.draw(given_steps((Transfer.KV,), num_members=dop))
    own = step.on(step.batch.group.leader_id)
    assert all(num_rows_of(own, i) == 0 for i in EVERYONE if i not in step.batch.group.instance_ids)
