"""Any step between real ends of the data plane: attention over KV anywhere equals that over all at once."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from attention_steps import EVERYONE, NUM_INSTANCES, GivenStep, given_steps, sharing_steps
from attention_world import (
    TOLERANCE,
    AttentionWorld,
    Heads,
    Outcome,
    Tokens,
    attention_world,
    pool_with_history,
)
from hypothesis import given
from hypothesis import strategies as st

from loong.core.instance import ESPGroup
from loong.core.kv_layout import KVLayout, row_of_heads
from loong.core.placement import KVSegment, Placement
from loong.core.plan import BatchPlan, QueryBlock, Transfer

HEADS = st.sampled_from([Heads(4, 2), Heads(2, 2), Heads(6, 1), Heads(1, 1, 2)])
SEEDS = st.integers(0, 2**16)


@pytest.fixture(scope="module")
def world() -> Iterator[AttentionWorld]:
    with attention_world(NUM_INSTANCES) as found:
        yield found


def assert_same(found: Outcome, expected: Outcome) -> None:
    assert found.out.keys() == expected.out.keys()
    for token, out in found.out.items():
        torch.testing.assert_close(out, expected.out[token], atol=TOLERANCE, rtol=TOLERANCE)


@given(given_steps(), HEADS, SEEDS)
def test_any_split_over_members_and_holders_equals_attention_over_all_kv(
    world: AttentionWorld, step: GivenStep, heads: Heads, seed: int
) -> None:
    tokens = Tokens.of(step, heads, seed)
    assert_same(world.run(step, tokens), Outcome(tokens.expected(step), {}))


@given(given_steps(), HEADS, SEEDS, st.integers(1, 12))
def test_a_layer_with_a_window_attends_the_last_positions_wherever_they_are(
    world: AttentionWorld, step: GivenStep, heads: Heads, seed: int, window: int
) -> None:
    tokens = Tokens.of(step, heads, seed)
    layout = KVLayout(1, row_of_heads(heads.num_kv_heads, heads.head_dim), "float32", (window,))
    pools = {i: pool_with_history(step, i, tokens, layout) for i in step.instance_ids}
    assert_same(world.run(step, tokens, pools), Outcome(tokens.expected(step, window), {}))


@given(sharing_steps(), HEADS, SEEDS, st.none() | st.integers(1, 12))
def test_what_requests_share_is_attended_as_if_each_had_it_alone(
    world: AttentionWorld, step: GivenStep, heads: Heads, seed: int, window: int | None
) -> None:
    tokens = Tokens.of(step, heads, seed)
    layout = KVLayout(1, row_of_heads(heads.num_kv_heads, heads.head_dim), "float32", (window,))
    pools = {i: pool_with_history(step, i, tokens, layout) for i in step.instance_ids}
    assert_same(world.run(step, tokens, pools), Outcome(tokens.expected(step, window), {}))


@given(given_steps(), SEEDS)
def test_new_kv_is_where_the_plan_says_to_the_bit_and_other_kv_is_as_it_was(
    world: AttentionWorld, step: GivenStep, seed: int
) -> None:
    tokens = Tokens.of(step, Heads(), seed)
    pools = world.run(step, tokens).pools
    for request_id, placement in step.placements.items():
        for segment in placement.adding(step.batch.writes_of(request_id)).segments:
            pool = pools[segment.instance_id]
            stored = pool.layer(0)[pool.slots(request_id, segment.positions)]
            assert torch.equal(stored, tokens.kv[request_id][list(segment.positions)])
    num_taken = {i: pool.num_used for i, pool in pools.items()}
    num_known = {i: int(pool.layer(0).isfinite().flatten(1).all(1).sum()) for i, pool in pools.items()}
    assert num_known == num_taken  # what no slot was taken for is NaN still


@given(given_steps().filter(lambda step: bool(step.batch.pushes)), SEEDS)
def test_pushed_kv_is_at_its_holder_alone_when_its_master_ends(
    world: AttentionWorld, step: GivenStep, seed: int
) -> None:
    tokens = Tokens.of(step, Heads(), seed)
    pools = world.run(step, tokens).pools
    for push in step.batch.pushes:
        owner_id, positions, holder_id = push.segment
        holder = pools[holder_id]
        stored = holder.layer(0)[holder.slots(owner_id, positions)]
        assert torch.equal(stored, tokens.kv[owner_id][list(positions)])
        others = [pool for i, pool in pools.items() if i not in (holder_id, push.block.master_id)]
        assert not any(torch.equal(kv, stored[0]) for pool in others for kv in pool.layer(0))


@given(given_steps(), SEEDS)
def test_a_step_gives_the_same_bits_again(world: AttentionWorld, step: GivenStep, seed: int) -> None:
    tokens = Tokens.of(step, Heads(), seed)
    first, second = (world.run(step, tokens) for _ in range(2))
    assert all(torch.equal(out, second.out[token]) for token, out in first.out.items())


@given(given_steps(most_requests=1), SEEDS, st.permutations(EVERYONE))
def test_any_ring_order_gives_the_same(
    world: AttentionWorld, step: GivenStep, seed: int, order: list[int]
) -> None:
    tokens = Tokens.of(step, Heads(), seed)
    ring = tuple(sorted(step.batch.group.instance_ids, key=order.index))
    assert_same(world.run(step.with_batch(group=ESPGroup(ring)), tokens), world.run(step, tokens))


@given(given_steps(), SEEDS, st.data())
def test_any_order_of_the_blocks_and_writes_gives_the_same(
    world: AttentionWorld, step: GivenStep, seed: int, data: st.DataObject
) -> None:
    tokens = Tokens.of(step, Heads(), seed)
    queries, writes = (
        tuple(data.draw(st.permutations(given))) for given in (step.batch.queries, step.batch.writes)
    )
    assert_same(world.run(step.with_batch(queries=queries, writes=writes), tokens), world.run(step, tokens))


@given(given_steps(), SEEDS)
def test_a_request_attends_in_company_what_it_attends_alone(
    world: AttentionWorld, step: GivenStep, seed: int
) -> None:
    tokens = Tokens.of(step, Heads(), seed)
    alone: dict[tuple[str, int], torch.Tensor] = {}
    for request_id in step.batch.request_ids:
        alone |= world.run(step.only_for(request_id), tokens).out
    assert_same(world.run(step, tokens), Outcome(alone, {}))


@given(given_steps((Transfer.KV,)), SEEDS)
def test_it_is_the_same_whether_kv_travels_or_queries_do(
    world: AttentionWorld, step: GivenStep, seed: int
) -> None:
    tokens = Tokens.of(step, Heads(), seed)
    queries = tuple(block._replace(transfer=Transfer.QUERY) for block in step.batch.queries)
    writes = tuple(KVSegment(b.request_id, b.positions, b.master_id) for b in queries)
    assert_same(world.run(step.with_batch(queries=queries, writes=writes), tokens), world.run(step, tokens))


@given(given_steps((Transfer.QUERY,)), SEEDS, st.permutations(EVERYONE))
def test_kv_that_has_moved_is_attended_as_before(
    world: AttentionWorld, step: GivenStep, seed: int, moves: list[int]
) -> None:
    tokens = Tokens.of(step, Heads(), seed)
    moved = {
        request_id: Placement().adding(s._replace(instance_id=moves[s.instance_id]) for s in p.segments)
        for request_id, p in step.placements.items()
    }
    assert_same(world.run(replace(step, placements=moved), tokens), world.run(step, tokens))


@given(given_steps(), SEEDS)
def test_kv_behind_a_query_changes_no_bit_of_it(world: AttentionWorld, step: GivenStep, seed: int) -> None:
    tokens = Tokens.of(step, Heads(), seed)
    before = world.run(step, tokens)
    for request_id in step.batch.request_ids:
        first = min(p for block in step.batch.blocks_of(request_id) for p in block.positions)
        changed = {r: kv.clone() for r, kv in tokens.kv.items()}
        changed[request_id][first + 1 :] *= -7.0
        after = world.run(step, replace(tokens, kv=changed))
        assert torch.equal(after.out[request_id, first], before.out[request_id, first])


@given(given_steps(most_requests=1), SEEDS, st.data())
def test_each_key_that_a_query_sees_counts(
    world: AttentionWorld, step: GivenStep, seed: int, data: st.DataObject
) -> None:
    """Values of one position alone are not 0: attention is its weight."""
    (request_id,) = step.known
    tokens = Tokens.of(step, Heads(), seed)
    key = data.draw(st.sampled_from(sorted(step.known[request_id])))
    kv = tokens.kv[request_id].clone()
    kv[:, 1] = 0.0
    kv[key, 1] = 1.0
    out = world.run(step, Tokens({request_id: tokens.q[request_id] / 3}, {request_id: kv})).out
    for (_, position), weights in out.items():
        assert (weights > 0).all() if key <= position else (weights == 0).all()


@given(given_steps(most_requests=1), SEEDS)
def test_kv_of_one_value_is_attended_as_that_value(world: AttentionWorld, step: GivenStep, seed: int) -> None:
    """The weights of a query's keys are 1 together, wherever they are."""
    (request_id,) = step.known
    tokens = Tokens.of(step, Heads(), seed)
    kv = tokens.kv[request_id].clone()
    kv[:, 1] = 2.5
    for out in world.run(step, replace(tokens, kv={request_id: kv})).out.values():
        torch.testing.assert_close(out, torch.full_like(out, 2.5), atol=TOLERANCE, rtol=TOLERANCE)


@given(given_steps(), SEEDS)
def test_each_query_head_reads_its_kv_head_alone(world: AttentionWorld, step: GivenStep, seed: int) -> None:
    tokens = Tokens.of(step, Heads(4, 2), seed)
    changed = {request_id: kv.clone() for request_id, kv in tokens.kv.items()}
    for kv in changed.values():
        kv[:, :, 1] *= -7.0
    before, after = (world.run(step, given).out for given in (tokens, replace(tokens, kv=changed)))
    for token, out in before.items():
        assert torch.equal(after[token][:2], out[:2])


@given(given_steps(), SEEDS, st.sampled_from([1e-20, 1e4]))
def test_scores_of_any_size_give_finite_attention(
    world: AttentionWorld, step: GivenStep, seed: int, size: float
) -> None:
    tokens = Tokens.of(step, Heads(), seed)
    large = replace(tokens, q={r: size * q for r, q in tokens.q.items()})
    found = world.run(step, large)
    assert all(out.isfinite().all() for out in found.out.values())
    assert_same(found, Outcome(large.expected(step), {}))


@pytest.mark.parametrize("num_members", range(1, NUM_INSTANCES + 1))
@pytest.mark.parametrize("num_tokens", [1, 2, 5])
@pytest.mark.parametrize("transfer", Transfer)
def test_instances_without_a_token_take_part(
    world: AttentionWorld, num_members: int, num_tokens: int, transfer: Transfer
) -> None:
    """One master computes all tokens of a request without a history."""
    block = QueryBlock("r0", range(num_tokens), num_members - 1, transfer)
    writes = (KVSegment("r0", block.positions, block.master_id),)
    step = GivenStep(BatchPlan(ESPGroup(tuple(range(num_members))), (block,), writes), {"r0": Placement()})
    tokens = Tokens.of(step, Heads(), num_tokens)
    assert_same(world.run(step, tokens), Outcome(tokens.expected(step), {}))
