"""Captured steps attend what those that the host launches do, where requests share what they read."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from machines import H200_GRAPH_LIMITS
from shared_steps import HEAD_DIM, NUM_HEADS, shared_step
from torch import Tensor

from loong.attention.attention_step import AttentionStep
from loong.attention.pool import PoolAttention, pool_attention
from loong.kernels import Partial
from loong.model.device import CpuDevice
from loong.worker.steps import attended_inputs
from loong.worker.steps.attended_inputs import AttendedInputs, PromptKeys

SIZE = 32


def inputs_of(step: AttentionStep) -> PoolAttention:
    num_slots = len(step.store.layer(0))
    memory = torch.zeros(AttendedInputs.num_words(num_slots, H200_GRAPH_LIMITS), dtype=torch.int64)
    inputs = AttendedInputs(memory, H200_GRAPH_LIMITS, None)
    filled = inputs.fill(step, SIZE, 1)
    return inputs.attention(SIZE, 1, PromptKeys.IN_POOL, has_decodes=True, is_shared=filled.is_shared)


def attended(attention: PoolAttention | None, step: AttentionStep) -> Partial:
    assert attention is not None
    q = torch.randn(SIZE, NUM_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    total = Partial.unseen(q, is_merged=True)
    attention.merge_into(total, q, step.store.layer(0), CpuDevice())
    num_rows = sum(len(block.positions) for block in step.blocks)
    return Partial(total.out[:num_rows], total.lse[:num_rows])


def readers(attention: PoolAttention) -> list[int]:
    rows: Tensor = torch.empty(0) if attention.shared is None else attention.shared.rows
    return sorted(row for row in rows.tolist() if row >= 0)


def assert_same(step: AttentionStep, attention: PoolAttention) -> None:
    apart = replace(step, least_saved=None)
    blocks = [(block, step.rows[block].start) for block in step.blocks]
    expected = attended(pool_attention(apart, blocks, CpuDevice()), step)
    for found, wanted in zip(attended(attention, step), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("paths", [["a"] * 4, ["ab", "ab", "a", "ac"], ["ab", "b", "ab", "b"]])
def test_chunks_and_decodes_read_together(paths: Sequence[str]) -> None:
    step = shared_step(paths, 5, [2, 0, 3, 1], [1, 3, 2, 4])
    attention = inputs_of(step)
    assert readers(attention) == list(range(10))
    assert_same(step, attention)


def test_chunks_read_alone_whose_rest_takes_more_tasks_than_a_graph_has() -> None:
    """The second request shares what is behind five keys of its own."""
    step = shared_step(["ab"] * 4, 5, [2, 0, 3, 1], [1, 3, 1, 4])
    placement = step.placements["r1"]
    step = replace(step, placements={**step.placements, "r1": placement.sharing(placement.shared[1:])})
    attention = inputs_of(step)
    assert readers(attention) == [0, 4]
    assert_same(step, attention)


def test_of_too_many_queries_those_of_the_longest_chunk_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attended_inputs, "MAX_DECODES", 7)
    step = shared_step(["a"] * 4, 5, [2, 0, 3, 1], [1, 4, 1, 3])
    attention = inputs_of(step)
    assert readers(attention) == [0, 5, 6, 7, 8]
    assert_same(step, attention)
