import math

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from loong.kernels import Partial, activate_and_mul, apply_rotary, attend, merge, reference, rms_norm

CPU = torch.device("cpu")
SCALE = 0.3

heads = st.sampled_from([(1, 1), (4, 1), (4, 2), (6, 6)])
seeds = st.integers(0, 2**31)
laws = examples(10, thorough=160)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def draw_partial(seed: int, num_tokens: int, unseen: bool = True) -> Partial:
    partial = Partial(draw(seed, num_tokens, 2, 8), 10 * draw(seed + 1, num_tokens, 2))
    hole = draw(seed + 2, num_tokens, 2) > 0.5 if unseen else torch.zeros(num_tokens, 2, dtype=torch.bool)
    return Partial(partial.out.masked_fill(hole[..., None], 0), partial.lse.masked_fill(hole, -torch.inf))


def assert_same(a: Partial, b: Partial, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a.out, b.out, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(a.lse, b.lse, atol=tolerance, rtol=tolerance)


@laws
@given(seeds, heads, st.integers(0, 9), st.integers(0, 40), st.data())
def test_any_split_of_the_kv_gives_the_same_attention(
    seed: int, num_heads: tuple[int, int], num_tokens: int, num_kv_tokens: int, data: st.DataObject
) -> None:
    h, kv = num_heads
    q, k, v = (
        draw(seed, num_tokens, h, 8),
        draw(seed + 1, num_kv_tokens, kv, 8),
        draw(seed + 2, num_kv_tokens, kv, 8),
    )
    q_positions = torch.randint(0, 40, (num_tokens,), generator=torch.Generator().manual_seed(seed))
    kv_positions = torch.randperm(num_kv_tokens, generator=torch.Generator().manual_seed(seed))
    owners = torch.tensor(
        data.draw(st.lists(st.integers(0, 2), min_size=num_kv_tokens, max_size=num_kv_tokens)),
        dtype=torch.int64,
    )
    whole = attend(q, k, v, scale=SCALE, q_positions=q_positions, kv_positions=kv_positions)
    merged = Partial.identity(num_tokens, h, 8, CPU)
    for owner in range(3):
        part = owners == owner
        merged = merge(
            merged,
            attend(
                q, k[part], v[part], scale=SCALE, q_positions=q_positions, kv_positions=kv_positions[part]
            ),
        )
    assert_same(merged, whole)


@laws
@given(seeds, heads, st.integers(1, 33), st.integers(0, 17))
def test_causal_by_positions_equals_torch(
    seed: int, num_heads: tuple[int, int], num_tokens: int, num_earlier: int
) -> None:
    h, kv = num_heads
    num_kv_tokens = num_earlier + num_tokens
    q, k, v = (
        draw(seed, num_tokens, h, 8),
        draw(seed + 1, num_kv_tokens, kv, 8),
        draw(seed + 2, num_kv_tokens, kv, 8),
    )
    kv_positions = torch.arange(num_kv_tokens)
    q_positions = kv_positions[num_earlier:]
    expected = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=kv_positions <= q_positions[:, None],
        scale=SCALE,
        enable_gqa=True,
    )
    partial = attend(q, k, v, scale=SCALE, q_positions=q_positions, kv_positions=kv_positions)
    torch.testing.assert_close(partial.out, expected[0].transpose(0, 1), atol=1e-5, rtol=1e-5)


def test_without_positions_every_key_is_visible_and_the_lse_is_a_natural_log() -> None:
    q, k, v = draw(0, 3, 4, 8), draw(1, 5, 2, 8), draw(2, 5, 2, 8)
    scores = torch.einsum("thd,shd->ths", q, k.repeat_interleave(2, dim=1)) * SCALE
    expected = torch.einsum("ths,shd->thd", scores.softmax(-1), v.repeat_interleave(2, dim=1))
    assert_same(attend(q, k, v, scale=SCALE), Partial(expected, scores.logsumexp(-1)))


@laws
@given(seeds, st.integers(1, 12), st.integers(1, 30), st.booleans())
def test_blocks_of_queries_change_nothing(seed: int, max_rows: int, num_tokens: int, is_causal: bool) -> None:
    q, k, v = draw(seed, num_tokens, 4, 8), draw(seed + 1, 20, 2, 8), draw(seed + 2, 20, 2, 8)
    q_positions = torch.randperm(num_tokens) - 3 if is_causal else None
    kv_positions = torch.randperm(20) if is_causal else None
    whole = attend(q, k, v, scale=SCALE, q_positions=q_positions, kv_positions=kv_positions)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "_MAX_SCORES", 4 * 20 * max_rows)
        blocks = attend(q, k, v, scale=SCALE, q_positions=q_positions, kv_positions=kv_positions)
    assert_same(blocks, whole)


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_a_row_that_sees_no_key_is_the_identity(num_tokens: int) -> None:
    q, k, v = draw(0, num_tokens, 4, 8), draw(1, 5, 2, 8), draw(2, 5, 2, 8)
    q_positions = torch.full((num_tokens,), 9)
    q_positions[0] = 3
    partial = attend(q, k, v, scale=SCALE, q_positions=q_positions, kv_positions=torch.arange(4, 9))
    assert torch.equal(partial.out[0], torch.zeros(4, 8))
    assert torch.equal(partial.lse[0], torch.full((4,), -torch.inf))
    assert partial.out.isfinite().all()
    assert partial.lse[1:].isfinite().all()


@pytest.mark.parametrize(("num_tokens", "num_kv_tokens"), [(0, 5), (3, 0), (0, 0)])
def test_no_queries_or_no_kv_give_the_identity(num_tokens: int, num_kv_tokens: int) -> None:
    kv = torch.randn(num_kv_tokens, 2, 8)
    identity = Partial.identity(num_tokens, 4, 8, CPU)
    assert_same(attend(torch.randn(num_tokens, 4, 8), kv, kv, scale=SCALE), identity)
    q, q_positions = torch.randn(num_tokens, 4, 8), torch.arange(num_tokens)
    positions = torch.arange(num_kv_tokens)
    assert_same(attend(q, kv, kv, scale=SCALE, q_positions=q_positions, kv_positions=positions), identity)


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_what_lies_around_a_view_of_the_pool_does_not_leak(num_tokens: int) -> None:
    pool = torch.full((20, 2, 2, 8), torch.nan)  # [slots, K and V, K, D]
    pool[5:12] = draw(0, 7, 2, 2, 8)
    queries = torch.full((num_tokens, 6, 8), torch.nan)
    queries[:, :4] = draw(1, num_tokens, 4, 8)
    k, v = pool[5:12, 0], pool[5:12, 1]
    clean = attend(queries[:, :4].clone(), k.clone(), v.clone(), scale=SCALE)
    assert_same(attend(queries[:, :4], k, v, scale=SCALE), clean)
    assert clean.out.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_accumulate_in_float32(dtype: torch.dtype) -> None:
    q, k, v = draw(0, 3, 4, 8).to(dtype), draw(1, 50, 2, 8).to(dtype), draw(2, 50, 2, 8).to(dtype)
    partial = attend(q, k, v, scale=SCALE)
    assert partial.out.dtype == partial.lse.dtype == torch.float32
    assert_same(partial, attend(q.float(), k.float(), v.float(), scale=SCALE))


def test_attend_refuses_what_its_contract_does_not_allow() -> None:
    q, k = torch.zeros(3, 4, 8), torch.zeros(5, 2, 8)
    with pytest.raises(ValueError, match="must be given together"):
        attend(q, k, k, scale=SCALE, q_positions=torch.arange(3))
    with pytest.raises(ValueError, match="multiple of KV heads, got 4 and 3"):
        attend(q, torch.zeros(5, 3, 8), torch.zeros(5, 3, 8), scale=SCALE)
    with pytest.raises(ValueError, match="v must have S=5 as k has, got S=6"):
        attend(q, k, torch.zeros(6, 2, 8), scale=SCALE)
    with pytest.raises(ValueError, match=r"kv_positions must be torch.int64, got torch.int32"):
        attend(
            q, k, k, scale=SCALE, q_positions=torch.arange(3), kv_positions=torch.arange(5, dtype=torch.int32)
        )


@laws
@given(seeds, st.integers(0, 5))
def test_merge_is_associative(seed: int, num_tokens: int) -> None:
    a, b, c = (draw_partial(seed + 10 * i, num_tokens) for i in range(3))
    assert_same(merge(merge(a, b), c), merge(a, merge(b, c)))


@laws
@given(seeds, st.integers(0, 5))
def test_merge_is_commutative_to_the_bit(seed: int, num_tokens: int) -> None:
    a, b = draw_partial(seed, num_tokens), draw_partial(seed + 10, num_tokens)
    assert_same(merge(a, b), merge(b, a), tolerance=0)


@laws
@given(seeds, st.integers(0, 5))
def test_merging_the_identity_changes_no_bit(seed: int, num_tokens: int) -> None:
    a = draw_partial(seed, num_tokens)
    assert_same(merge(a, Partial.identity(num_tokens, 2, 8, CPU)), a, tolerance=0)


def test_merging_survives_scores_that_overflow_an_exponential() -> None:
    a = Partial(torch.ones(1, 1, 2), torch.tensor([[1000.0]]))
    b = Partial(torch.zeros(1, 1, 2), torch.tensor([[1000.0]]))
    assert_same(merge(a, b), Partial(torch.full((1, 1, 2), 0.5), torch.tensor([[1000.0 + math.log(2)]])))


def test_rms_norm_rounds_before_it_multiplies_by_the_weight() -> None:
    x, weight = draw(0, 5, 16).bfloat16(), draw(1, 16).bfloat16()
    wide = x.float()
    unit = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert torch.equal(rms_norm(x, weight, 1e-5), unit.bfloat16() * weight)


@given(seeds, st.integers(0, 1000), st.integers(-400, 400))
@laws
def test_rotated_products_depend_on_the_distance_alone(seed: int, position: int, distance: int) -> None:
    frequencies = 10000.0 ** -(torch.arange(4, dtype=torch.float64) / 4)
    x, y = draw(seed, 1, 2, 8).double(), draw(seed + 1, 1, 2, 8).double()

    def rotate(tensor: Tensor, at: int) -> Tensor:
        angles = (at * frequencies).repeat(2)[None]
        return apply_rotary(tensor, angles.cos(), angles.sin())

    here = (rotate(x, position) * rotate(y, position + distance)).sum(-1)
    origin = (rotate(x, 0) * rotate(y, distance)).sum(-1)
    torch.testing.assert_close(here, origin)


def test_rotary_pairs_the_two_halves_of_a_head() -> None:
    quarter_turn = torch.tensor([[0.0, 1.0, 0.0, 1.0]]), torch.tensor([[1.0, 0.0, 1.0, 0.0]])
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    assert torch.equal(apply_rotary(x, *quarter_turn), torch.tensor([[[-3.0, 2.0, 1.0, 4.0]]]))


def test_activate_and_mul_gates_the_second_by_the_first() -> None:
    gate, up = draw(0, 3, 4), draw(1, 3, 4)
    torch.testing.assert_close(activate_and_mul(gate, up), gate * gate.sigmoid() * up)
