"""Attention over an instance's pool is the same whether or not keys are copied out of it first."""

from dataclasses import replace

import pytest
import torch

from loong.attention import pool
from loong.attention.pool import PoolAttention, pool_attention
from loong.attention.step import Step
from loong.core.instance import ESPGroup
from loong.core.placement import KVSegment, Placement
from loong.core.plan import BatchPlan, QueryBlock, Transfer
from loong.kernels import Partial
from loong.model.device import CpuDevice
from loong.worker.kv_pool import KVPool

HELD, CHUNK, OTHER = range(30), range(30, 37), range(5)


def attention_of(*prompts: str) -> tuple[PoolAttention, KVPool]:
    """What chunks of prompts attend on one instance: of "a" behind a history, of "b" a whole prompt."""
    kv = KVPool(1, 2, 4, 64, torch.float32, torch.device("cpu"))
    kv.layer(0).copy_(torch.randn(kv.layer(0).shape))
    for owner_id, positions in (("a", HELD), ("b", OTHER), ("a", CHUNK)):
        kv.allocate(owner_id, positions, num_expected=1 << 20)
    chunks = {"a": CHUNK, "b": OTHER}
    blocks = tuple(QueryBlock(name, chunks[name], 0, Transfer.QUERY) for name in prompts)
    writes = tuple(KVSegment(name, chunks[name], 0) for name in prompts)
    placements = {"a": Placement((KVSegment("a", HELD, 0),)), "b": Placement()}
    step = Step(0, BatchPlan(ESPGroup((0,)), blocks, writes), placements, kv)
    attention = pool_attention(step, ((block, step.rows[block].start) for block in blocks), CpuDevice())
    assert attention is not None
    return attention, kv


def test_keys_may_be_copied_out_of_the_pool() -> None:
    torch.manual_seed(0)
    attention, kv = attention_of("a", "b")
    q, device = torch.randn(len(CHUNK) + len(OTHER), 4, 4), CpuDevice()
    totals = []
    for is_copied in (False, True):
        total = Partial.unseen(q, is_merged=True)
        replace(attention, is_copied=is_copied).merge_into(total, q, kv.layer(0), device)
        totals.append(total)
    assert torch.equal(totals[0].out, totals[1].out)
    assert torch.equal(totals[0].lse, totals[1].lse)
    assert totals[0].lse.isfinite().all()


def test_keys_that_are_in_a_row_are_attended_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_LEAST_IN_ROW", len(CHUNK) + 1)
    assert attention_of("a", "b")[0].in_row is None
    assert attention_of("a")[0].in_row is None
    monkeypatch.setattr(pool, "_LEAST_IN_ROW", len(CHUNK))
    attention, kv = attention_of("a")
    assert attention.in_row == slice(0, len(HELD) + len(CHUNK))
    assert not attention.is_copied
    q, device = torch.randn(len(CHUNK), 4, 4), CpuDevice()
    totals = []
    for in_row in (attention.in_row, None):
        total = Partial.unseen(q, is_merged=True)
        replace(attention, in_row=in_row).merge_into(total, q, kv.layer(0), device)
        totals.append(total)
    assert torch.equal(totals[0].out, totals[1].out)
    assert torch.equal(totals[0].lse, totals[1].lse)


def test_keys_are_copied_for_many_queries_if_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not attention_of("a", "b")[0].is_copied
    monkeypatch.setattr(pool, "_LEAST_IN_ROW", len(CHUNK) + len(OTHER))
    assert attention_of("a", "b")[0].is_copied
    monkeypatch.setattr(pool, "_MOST_COPIED", len(HELD) + len(CHUNK))
    assert not attention_of("a", "b")[0].is_copied
