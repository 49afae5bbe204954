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


def attention_of_two_prompts() -> tuple[PoolAttention, KVPool]:
    """A chunk behind a history, and a prompt, on one instance whose slots are in no order."""
    kv = KVPool(1, 2, 4, 64, torch.float32, torch.device("cpu"))
    kv.layer(0).copy_(torch.randn(kv.layer(0).shape))
    for owner_id, positions in (("gone", range(3)), ("a", HELD), ("b", OTHER), ("a", CHUNK)):
        kv.allocate(owner_id, positions)
        kv.release("gone")
    blocks = (QueryBlock("a", CHUNK, 0, Transfer.QUERY), QueryBlock("b", OTHER, 0, Transfer.QUERY))
    writes = (KVSegment("a", CHUNK, 0), KVSegment("b", OTHER, 0))
    placements = {"a": Placement((KVSegment("a", HELD, 0),)), "b": Placement()}
    step = Step(0, BatchPlan(ESPGroup((0,)), blocks, writes), placements, kv)
    attention = pool_attention(step, ((block, step.rows[block].start) for block in blocks), CpuDevice())
    assert attention is not None
    return attention, kv


def test_keys_may_be_copied_out_of_the_pool() -> None:
    torch.manual_seed(0)
    attention, kv = attention_of_two_prompts()
    q, device = torch.randn(len(CHUNK) + len(OTHER), 4, 4), CpuDevice()
    totals = []
    for is_copied in (False, True):
        total = Partial.unseen(q, is_merged=True)
        replace(attention, is_copied=is_copied).merge_into(total, q, kv.layer(0), device)
        totals.append(total)
    assert torch.equal(totals[0].out, totals[1].out)
    assert torch.equal(totals[0].lse, totals[1].lse)
    assert totals[0].lse.isfinite().all()


def test_keys_are_copied_for_many_queries_if_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not attention_of_two_prompts()[0].is_copied
    monkeypatch.setattr(pool, "_LEAST_COPIED", len(CHUNK) + len(OTHER))
    assert attention_of_two_prompts()[0].is_copied
    monkeypatch.setattr(pool, "_MOST_COPIED", len(HELD) + len(CHUNK))
    assert not attention_of_two_prompts()[0].is_copied
