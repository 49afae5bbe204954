"""Attention anywhere moves rows of KV whole: nothing but the kernels of a device looks inside one."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from attention_steps import NUM_INSTANCES, GivenStep, given_steps
from attention_world import (
    TOLERANCE,
    AttentionWorld,
    Heads,
    Tokens,
    attention_world,
    pool_with_history,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from loong.core.kv_layout import KVLayout, row_of_fp8_heads, row_of_heads
from loong.kernels import Partial
from loong.kernels.kv_rows import dequantized, quantized
from loong.kernels.slots import SlotLists
from loong.model.device import AttendTable, CpuDevice

HEADS = Heads()
ROW_SHAPE = row_of_heads(HEADS.num_kv_heads, HEADS.head_dim)
BYTES = KVLayout(1, (KVLayout(1, ROW_SHAPE, "float32").row_bytes,), "uint8")


class DeviceOfBytes(CpuDevice):
    """Kernels that alone know what the bytes of a row are."""

    def attend_slots(self, q: Tensor, kv: Tensor, lists: SlotLists, *, scale: float, out: Partial) -> None:
        super().attend_slots(q, _inside(kv), lists, scale=scale, out=out)

    def attend_blocks(
        self,
        q: Tensor,
        kv: Tensor,
        table: AttendTable,
        *,
        scale: float,
        total: Partial,
        slots: Tensor | None = None,
    ) -> None:
        super().attend_blocks(q, _inside(kv), table, scale=scale, total=total, slots=slots)


def _inside(rows: Tensor) -> Tensor:
    return rows.view(torch.float32).view(len(rows), *ROW_SHAPE)


@pytest.fixture(scope="module")
def world() -> Iterator[AttentionWorld]:
    with attention_world(NUM_INSTANCES) as found:
        yield found


@pytest.fixture(scope="module")
def world_of_bytes() -> Iterator[AttentionWorld]:
    with attention_world(NUM_INSTANCES) as found:
        found.device = DeviceOfBytes()
        yield found


@given(given_steps(), st.integers(0, 2**16))
def test_rows_in_fp8_are_attended_as_the_values_that_are_stored(
    world: AttentionWorld, step: GivenStep, seed: int
) -> None:
    """KV is quantized once, before it travels, so that all queries see the same values."""
    tokens = Tokens.of(step, HEADS, seed)
    layout = KVLayout(1, row_of_fp8_heads(HEADS.num_kv_heads, HEADS.head_dim), "uint8")
    pools = {i: pool_with_history(step, i, tokens, layout) for i in step.instance_ids}
    kept = {name: dequantized(quantized(kv), HEADS.head_dim) for name, kv in tokens.kv.items()}
    found, expected = world.run(step, tokens, pools), replace(tokens, kv=kept).expected(step)
    assert found.out.keys() == expected.keys()
    for token, out in found.out.items():
        torch.testing.assert_close(out, expected[token], atol=TOLERANCE, rtol=TOLERANCE)


@given(given_steps(), st.integers(0, 2**16))
def test_rows_of_bytes_give_the_bits_of_rows_of_heads(
    world: AttentionWorld, world_of_bytes: AttentionWorld, step: GivenStep, seed: int
) -> None:
    tokens = Tokens.of(step, HEADS, seed)
    pools = {i: pool_with_history(step, i, tokens, BYTES) for i in step.instance_ids}
    expected, found = world.run(step, tokens), world_of_bytes.run(step, tokens, pools)
    assert found.out.keys() == expected.out.keys()
    assert all(torch.equal(out, expected.out[token]) for token, out in found.out.items())
    for instance_id, pool in expected.pools.items():
        assert torch.equal(pool.layer(0).flatten(1).view(torch.uint8), pools[instance_id].layer(0))
