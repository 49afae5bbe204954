"""Attention is the same whether what requests share is read once, or again for each of them."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from shared_steps import HEAD_DIM, NUM_HEADS, shared_step

from loong.attention.attention_step import AttentionStep
from loong.attention.pool import PoolAttention, pool_attention
from loong.kernels import Partial
from loong.model.device import CpuDevice

DEVICE = CpuDevice()


def attention_of(step: AttentionStep) -> PoolAttention:
    found = pool_attention(step, [(block, step.rows[block].start) for block in step.blocks], DEVICE)
    assert found is not None
    return found


def attended(step: AttentionStep) -> Partial:
    num_rows = sum(len(block.positions) for block in step.blocks)
    q = torch.randn(num_rows, NUM_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    total = Partial.unseen(q, is_merged=True)
    total.out.fill_(torch.nan)
    attention_of(step).merge_into(total, q, step.store.layer(0), DEVICE)
    return total


def assert_same(step: AttentionStep) -> None:
    once, apart = attended(step), attended(replace(step, least_saved=None))
    torch.testing.assert_close(once.out, apart.out, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(once.lse, apart.lse, atol=2e-6, rtol=1e-5)


@st.composite
def steps(draw: st.DrawFn) -> AttentionStep:
    """Draw decodes and chunks behind the nodes of a tree, whose paths end at any depth."""
    paths = draw(st.lists(st.text("ab", max_size=5), min_size=1, max_size=8))
    alone = [draw(st.integers(0, 5)) for _ in paths]
    queries = [draw(st.sampled_from((1, 1, 3))) for _ in paths]
    return shared_step(paths, draw(st.integers(1, 9)), alone, queries)


@examples(8, thorough=160)
@given(steps())
def test_trees_of_prefixes_give_the_same_attention(step: AttentionStep) -> None:
    assert_same(step)


@pytest.mark.parametrize("num_sharers", [1, 2, 64, 256])
def test_any_number_of_sharers_gives_the_same_attention(num_sharers: int) -> None:
    alone = [number % 3 for number in range(num_sharers)]
    step = shared_step(["a"] * num_sharers, 40, alone, [1] * num_sharers)
    assert_same(step)
    shared = attention_of(step).shared
    assert (shared is not None) == (num_sharers > 1)
    if shared is not None:  # its keys are listed once
        assert (len(shared.slots), len(shared.rows)) == (40, num_sharers)


def shared_rows(step: AttentionStep) -> Sequence[int]:
    shared = attention_of(step).shared
    return [] if shared is None else shared.rows.tolist()


def test_a_pass_is_taken_if_it_saves_more_keys_than_it_costs_with_its_queries() -> None:
    step = shared_step(["a"] * 5, 10, [2] * 5, [1] * 5)  # saves 40 keys
    assert shared_rows(replace(step, least_saved=39)) == [0, 1, 2, 3, 4]  # 5 queries cost 5 % more
    assert shared_rows(replace(step, least_saved=40)) == []


def test_keys_behind_a_query_stay_apart() -> None:
    """A request that computes a hole again does not see what it shares behind the hole."""
    step = shared_step(["a"] * 3, 10, [2] * 3, [1] * 3)
    (first, *others), (write, *writes) = step.batch.queries, step.batch.writes
    hole = range(4, 5)
    placements = {**step.placements}
    held = placements["r0"].segments[0]
    placements["r0"] = placements["r0"].removing(held._replace(positions=hole))
    batch = replace(
        step.batch,
        queries=(first._replace(positions=hole), *others),
        writes=(write._replace(positions=hole), *writes),
    )
    holed = replace(step, batch=batch, placements=placements)
    assert_same(holed)
    assert shared_rows(holed) == [0, 1, 2]
    shared = attention_of(holed).shared
    assert shared is not None
    # before the hole all three read together, behind it the other two
    assert [task[1::2][:2] for task in shared.tasks.tolist()] == [[3, 4], [2, 6]]
