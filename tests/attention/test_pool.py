"""Attention over an instance's pool is the same wherever keys are, or are copied to."""

from dataclasses import replace

import pytest
import torch

from loong.attention import pool
from loong.attention.attention_step import AttentionStep
from loong.attention.pool import KeysCopied, KeysInPool, KeysInRow, PoolAttention, pool_attention
from loong.core.instance import ESPGroup
from loong.core.kv_layout import KVLayout, row_of_heads
from loong.core.placement import KVSegment, Placement
from loong.core.plan import BatchPlan, QueryBlock, Transfer
from loong.kernels import Partial
from loong.model.device import CpuDevice
from loong.worker.kv.pool import KVPool

HELD, CHUNK, OTHER = range(30), range(30, 37), range(5)


def attention_of(*prompts: str) -> tuple[PoolAttention, KVPool]:
    """Return the attention of chunks on one instance: of "a" after a history, of "b" a whole prompt."""
    kv = KVPool(KVLayout(1, row_of_heads(2, 4), "float32"), 64, torch.device("cpu"))
    kv.layer(0).copy_(torch.randn(kv.layer(0).shape))
    for owner_id, positions in (("a", HELD), ("b", OTHER), ("a", CHUNK)):
        kv.allocate(owner_id, positions, num_expected=1 << 20)
    chunks = {"a": CHUNK, "b": OTHER}
    blocks = tuple(QueryBlock(name, chunks[name], 0, Transfer.QUERY) for name in prompts)
    writes = tuple(KVSegment(name, chunks[name], 0) for name in prompts)
    placements = {"a": Placement((KVSegment("a", HELD, 0),)), "b": Placement()}
    step = AttentionStep(0, BatchPlan(ESPGroup((0,)), blocks, writes), placements, kv)
    attention = pool_attention(step, ((block, step.rows[block].start) for block in blocks), CpuDevice())
    assert attention is not None
    return attention, kv


def attended(attention: PoolAttention, kv: KVPool, num_queries: int) -> Partial:
    q = torch.randn(num_queries, 4, 4, generator=torch.Generator().manual_seed(1))
    total = Partial.unseen(q, is_merged=True)
    attention.merge_into(total, q, kv.layer(0), CpuDevice())
    assert total.lse.isfinite().all()
    return total


def assert_same(found: Partial, expected: Partial) -> None:
    assert torch.equal(found.out, expected.out)
    assert torch.equal(found.lse, expected.lse)


def test_keys_may_be_copied_out_of_the_pool_as_many_as_there_are() -> None:
    torch.manual_seed(0)
    attention, kv = attention_of("a", "b")
    num_queries = len(CHUNK) + len(OTHER)
    assert isinstance(attention.keys, KeysInPool)
    expected, slots = attended(attention, kv, num_queries), attention.keys.slots
    assert_same(attended(replace(attention, keys=KeysCopied(slots)), kv, num_queries), expected)
    more = torch.cat((slots, torch.full((9,), 1 << 40)))  # what is behind them in a list of fixed length
    some = KeysCopied(more, torch.tensor([len(slots)]))
    assert_same(attended(replace(attention, keys=some), kv, num_queries), expected)


def test_keys_that_are_in_a_row_are_attended_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_LEAST_IN_ROW", len(CHUNK) + 1)
    assert not isinstance(attention_of("a", "b")[0].keys, KeysInRow)
    assert not isinstance(attention_of("a")[0].keys, KeysInRow)
    monkeypatch.setattr(pool, "_LEAST_IN_ROW", len(CHUNK))
    attention, kv = attention_of("a")
    assert attention.keys == KeysInRow(slice(0, len(HELD) + len(CHUNK)))
    in_pool = replace(attention, keys=KeysInPool(torch.arange(len(HELD) + len(CHUNK))))
    assert_same(attended(attention, kv, len(CHUNK)), attended(in_pool, kv, len(CHUNK)))


def test_keys_are_copied_for_many_queries_if_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(attention_of("a", "b")[0].keys, KeysInPool)
    monkeypatch.setattr(pool, "_LEAST_IN_ROW", len(CHUNK) + len(OTHER))
    assert isinstance(attention_of("a", "b")[0].keys, KeysCopied)
    monkeypatch.setattr(pool, "MOST_COPIED", len(HELD) + len(CHUNK))
    assert isinstance(attention_of("a", "b")[0].keys, KeysInPool)


def test_what_all_queries_of_several_masters_see_is_listed_and_attended_once() -> None:
    """Instance 0 holds the history; both instances compute a half of the chunk."""
    kv = KVPool(KVLayout(1, row_of_heads(2, 4), "float32"), 64, torch.device("cpu"))
    kv.allocate("a", HELD, num_expected=1 << 20)
    halves = (range(30, 34), range(34, 37))
    blocks = tuple(QueryBlock("a", half, i, Transfer.QUERY) for i, half in enumerate(halves, 1))
    writes = tuple(KVSegment("a", half, i) for i, half in enumerate(halves, 1))
    placements = {"a": Placement((KVSegment("a", HELD, 0),))}
    step = AttentionStep(0, BatchPlan(ESPGroup((0, 1, 2)), blocks, writes), placements, kv)
    attention = pool_attention(step, zip(blocks, (0, len(halves[0])), strict=True), CpuDevice())
    assert attention is not None
    assert isinstance(attention.keys, KeysInPool)
    assert len(attention.keys.slots) == len(HELD)
    (table,) = attention.tables
    assert table.turns[0][:, 1].tolist() == [len(CHUNK)]
