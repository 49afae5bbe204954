"""Queries that travel: both ends agree on them, and each meets each key where the key is, once."""

from collections import Counter
from collections.abc import Iterator

from attention_steps import GivenStep, given_steps
from hypothesis import given

from loong.attention.attention_step import AttentionStep
from loong.attention.pool import KeysInPool, PoolAttention
from loong.attention.remote import QueryLayout, query_layout
from loong.core.plan import Transfer
from loong.kernels.attend_task import AttendTask
from loong.model.device import CpuDevice

QUERY_STEPS = given_steps((Transfer.QUERY,))
Token = tuple[str, int]


def layouts_of(step: GivenStep) -> dict[int, tuple[AttentionStep, QueryLayout]]:
    """Return the part of each instance, members and holders."""
    steps = {instance_id: step.on(instance_id) for instance_id in step.instance_ids}
    return {instance_id: (own, query_layout(own, CpuDevice())) for instance_id, own in steps.items()}


def own_tokens(own: AttentionStep) -> list[Token]:
    return [(block.request_id, position) for block in own.blocks for position in block.positions]


def tokens_of_slots(step: GivenStep, own: AttentionStep) -> dict[int, Token]:
    """Return the token in each slot of an instance's pool."""
    kv = {r: own.kv_on(own.instance_id, r) for r in step.batch.request_ids}
    return {
        slot: (request_id, position)
        for request_id, ranges in kv.items()
        for positions in ranges
        for position, slot in zip(positions, own.store.slots(request_id, positions).tolist(), strict=True)
    }


def pairs_of(attention: PoolAttention | None) -> Iterator[tuple[int, int]]:
    """Yield each row of queries with each slot that it meets."""
    if attention is None:
        return
    if attention.singles is not None:
        for number, row in enumerate(attention.singles.rows.tolist()):
            yield from ((row, slot) for slot in attention.singles.lists.list_of(number).tolist())
    assert isinstance(attention.keys, KeysInPool)
    for task in (AttendTask(*line) for t in attention.tables for line in t.turns[0].tolist()):
        for query in range(task.num_queries):
            for key in range(task.num_keys):
                limit = task.first_query + query * task.query_step
                if task.first_key + key * task.key_step <= limit:
                    yield task.query_row + query, int(attention.keys.slots[task.key_row + key])


@given(given_steps())
def test_both_ends_of_an_exchange_know_how_many_queries_travel(step: GivenStep) -> None:
    found = layouts_of(step)
    sent = {
        (i, peer): len(rows)
        for i, (_, layout) in found.items()
        for peer, rows in layout.routing.sent_rows.items()
    }
    came = {
        (peer, i): n for i, (_, layout) in found.items() for peer, n in layout.routing.num_peer_rows.items()
    }
    assert sent == came
    assert all(sent.values())


@given(QUERY_STEPS)
def test_each_query_meets_each_key_up_to_it_once_over_all_instances(step: GivenStep) -> None:
    found = layouts_of(step)
    met: Counter[tuple[str, int, int]] = Counter()
    for instance_id, (own, layout) in found.items():
        keys, came = tokens_of_slots(step, own), []
        for peer_id in layout.routing.num_peer_rows:
            peer, its_layout = found[peer_id]
            rows = its_layout.routing.sent_rows[instance_id].tolist()
            came += [own_tokens(peer)[row] for row in rows]
        for tokens, attention in ((own_tokens(own), layout.local), (came, layout.peer_attention)):
            for row, slot in pairs_of(attention):
                (request_id, position), (owner_id, key) = tokens[row], keys[slot]
                assert owner_id == request_id
                met[request_id, position, key] += 1
    queries = [(block.request_id, p) for block in step.batch.queries for p in block.positions]
    assert met == Counter((r, p, key) for r, p in queries for key in step.known[r] if key <= p)


@given(given_steps())
def test_a_query_goes_only_where_it_sees_kv_and_to_no_instance_twice(step: GivenStep) -> None:
    for instance_id, (own, layout) in layouts_of(step).items():
        tokens = own_tokens(own)
        for peer_id, rows in layout.routing.sent_rows.items():
            assert peer_id != instance_id
            assert len(set(rows.tolist())) == len(rows)
            for request_id, _ in (tokens[row] for row in rows.tolist()):
                assert own.kv_on(peer_id, request_id)


@given(given_steps())
def test_queries_whose_kv_travels_stay_at_home(step: GivenStep) -> None:
    for own, layout in layouts_of(step).values():
        travelling = own.requests(Transfer.KV)
        tokens = own_tokens(own)
        sent = [tokens[row] for rows in layout.routing.sent_rows.values() for row in rows.tolist()]
        local = [tokens[row] for row, _ in pairs_of(layout.local)]
        assert not [request_id for request_id, _ in (*sent, *local) if request_id in travelling]


@given(given_steps())
def test_an_instance_outside_the_group_asks_nothing(step: GivenStep) -> None:
    found = layouts_of(step)
    for holder_id in step.holder_ids:
        own, layout = found[holder_id]
        assert not own.blocks
        assert not layout.routing.sent_rows
        assert layout.local is None


@given(given_steps())
def test_new_kv_that_stays_has_the_slots_of_its_tokens_in_the_order_of_rows(step: GivenStep) -> None:
    for own, layout in layouts_of(step).values():
        kept = [b for b in own.blocks if b.transfer is Transfer.QUERY]
        expected = [s for b in kept for s in own.store.slots(b.request_id, b.positions).tolist()]
        assert layout.stored_slots.tolist() == expected


@given(given_steps())
def test_what_is_not_merged_is_of_one_call_a_query_and_of_no_peer(step: GivenStep) -> None:
    for _, layout in layouts_of(step).values():
        if not layout.is_merged:
            assert layout.routing.is_empty
            calls = Counter(row for row, _ in pairs_of(layout.local))
            tables = () if layout.local is None else layout.local.tables
            assert len(tables) <= 1
            assert all(count >= 1 for count in calls.values())


@given(given_steps())
def test_partials_of_peers_are_of_the_rows_that_came(step: GivenStep) -> None:
    for _, layout in layouts_of(step).values():
        num_rows = sum(layout.routing.num_peer_rows.values())
        assert {row for row, _ in pairs_of(layout.peer_attention)} <= set(range(num_rows))
        assert (layout.peer_attention is None) == (num_rows == 0)


@given(given_steps())
def test_masters_and_holders_agree_on_the_kv_that_is_pushed_between_them(step: GivenStep) -> None:
    pushed: Counter[tuple[int, int]] = Counter()
    for push in step.batch.pushes:
        assert push.segment.instance_id not in step.batch.group.instance_ids
        assert set(push.segment.positions) <= set(push.block.positions)
        pushed[push.block.master_id, push.segment.instance_id] += len(push.segment.positions)
    outside = [s for s in step.batch.writes if s.instance_id not in step.batch.group.instance_ids]
    assert sum(pushed.values()) == sum(len(segment.positions) for segment in outside)
