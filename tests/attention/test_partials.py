"""Partials that travel: any split of the KV, merged in any order, gives the attention over all of it."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from loong.attention.exchange import packed, unpacked
from loong.kernels import Partial, attend
from loong.model.device import CpuDevice

DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
SEEDS = st.integers(0, 2**16)
HEADS = st.sampled_from([(4, 2), (3, 1), (2, 2)])
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def random_tokens(
    seed: int, num_queries: int, num_keys: int, heads: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return queries [T, H, D] and KV [S, 2, K, D]."""
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    q = 3 * torch.randn(num_queries, num_heads, 4, generator=generator)
    return q, torch.randn(num_keys, 2, num_kv_heads, 4, generator=generator)


def attended(q: Tensor, kv: Tensor) -> Partial:
    out, lse = attend(q, kv[:, 0], kv[:, 1], scale=0.5)
    return Partial(out.contiguous(), lse.contiguous())


def sent(part: Partial, dtype: torch.dtype) -> Partial:
    """Return a partial as it arrives, of one peer."""
    _, num_heads, head_dim = part.out.shape
    return unpacked(packed(part, dtype), num_heads, head_dim)


def merged(q: Tensor, parts: list[Partial], rows: Tensor | None = None) -> Partial:
    total = Partial.unseen(q, is_merged=True)
    total.out.fill_(torch.nan)
    for part in parts:
        CpuDevice().merge_into(total, part, torch.arange(len(q)) if rows is None else rows)
    return total


@st.composite
def splits(draw: st.DrawFn) -> list[list[int]]:
    """Draw the holder of each key, and return the keys of each of four holders, some without any."""
    homes = draw(st.lists(st.integers(0, 3), min_size=1, max_size=16))
    return [[key for key, home in enumerate(homes) if home == holder] for holder in range(4)]


@given(splits(), st.integers(1, 3), HEADS, SEEDS, DTYPES)
def test_partials_of_any_holders_are_the_attention_over_all_their_kv(
    split: list[list[int]], num_queries: int, heads: tuple[int, int], seed: int, dtype: torch.dtype
) -> None:
    q, kv = random_tokens(seed, num_queries, sum(map(len, split)), heads)
    total = merged(q, [sent(attended(q, kv[keys]), dtype) for keys in split])
    expected = attended(q, kv)
    torch.testing.assert_close(total.out, expected.out, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    torch.testing.assert_close(total.lse, expected.lse, atol=1e-5, rtol=1e-5)


@given(splits(), HEADS, SEEDS, st.permutations(range(4)))
def test_the_order_in_which_partials_are_merged_changes_only_the_last_digits(
    split: list[list[int]], heads: tuple[int, int], seed: int, order: list[int]
) -> None:
    q, kv = random_tokens(seed, 2, sum(map(len, split)), heads)
    parts = [sent(attended(q, kv[keys]), torch.float32) for keys in split]
    first, second = merged(q, parts), merged(q, [parts[holder] for holder in order])
    torch.testing.assert_close(first.out, second.out, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(first.lse, second.lse, atol=2e-6, rtol=2e-6)


@given(splits(), HEADS, SEEDS, DTYPES)
def test_a_partial_that_saw_nothing_changes_no_bit(
    split: list[list[int]], heads: tuple[int, int], seed: int, dtype: torch.dtype
) -> None:
    q, kv = random_tokens(seed, 2, sum(map(len, split)), heads)
    nothing = sent(attended(q, kv[:0]), dtype)
    parts = [sent(attended(q, kv[keys]), dtype) for keys in split if keys]
    first = merged(q, parts)
    second = merged(q, [nothing, *(each for part in parts for each in (part, nothing))])
    assert torch.equal(first.out, second.out)
    assert torch.equal(first.lse, second.lse)


@given(HEADS, SEEDS, DTYPES)
def test_the_only_partial_arrives_to_the_bit(heads: tuple[int, int], seed: int, dtype: torch.dtype) -> None:
    q, kv = random_tokens(seed, 3, 5, heads)
    part = attended(q, kv)
    total = merged(q, [sent(part, dtype)])
    assert torch.equal(total.out, part.out.to(dtype).float())
    assert torch.equal(total.lse, part.lse)


@given(st.integers(0, 4), HEADS, SEEDS, DTYPES)
def test_a_message_has_out_in_the_dtype_of_queries_and_lse_to_the_bit(
    num_rows: int, heads: tuple[int, int], seed: int, dtype: torch.dtype
) -> None:
    q, kv = random_tokens(seed, num_rows, 5, heads)
    part = attended(q, kv)
    message = packed(part, dtype)
    assert (message.dtype, message.is_contiguous()) == (dtype, True)
    assert message.nbytes == part.out.numel() * dtype.itemsize + part.lse.nbytes
    (out,), (lse,) = sent(part, dtype)
    assert torch.equal(out, part.out.to(dtype))
    assert torch.equal(lse, part.lse)


@given(SEEDS, DTYPES)
def test_one_key_is_its_value(seed: int, dtype: torch.dtype) -> None:
    q, kv = random_tokens(seed, 2, 1, (4, 2))
    total = merged(q, [sent(attended(q, kv), dtype)])
    assert torch.equal(total.out, kv[:, 1].repeat_interleave(2, 1).to(dtype).float().expand_as(q))


@given(splits(), st.permutations(range(5)), SEEDS)
def test_partials_reach_their_rows_and_no_others(split: list[list[int]], rows: list[int], seed: int) -> None:
    q, kv = random_tokens(seed, 5, sum(map(len, split)), (4, 2))
    asked, left = torch.tensor(rows[:3]), torch.tensor(rows[3:])
    total = merged(q, [sent(attended(q[asked], kv[keys]), torch.float32) for keys in split], asked)
    torch.testing.assert_close(total.out[asked], attended(q[asked], kv).out, atol=2e-5, rtol=2e-5)
    assert total.out[left].isnan().all()
    assert (total.lse[left] == -torch.inf).all()


@given(splits(), SEEDS, st.floats(-1e4, 1e4))
def test_a_score_more_for_all_keys_changes_no_weight(split: list[list[int]], seed: int, more: float) -> None:
    """The lse of each partial grows by it, so only differences between holders count."""
    q, kv = random_tokens(seed, 2, sum(map(len, split)), (2, 2))
    parts = [attended(q, kv[keys]) for keys in split]
    raised = [part._replace(lse=part.lse + more) for part in parts]
    first, second = (merged(q, [sent(p, torch.float32) for p in each]) for each in (parts, raised))
    torch.testing.assert_close(first.out, second.out, atol=5e-3, rtol=5e-3)
    torch.testing.assert_close(first.lse + more, second.lse, atol=2e-3, rtol=1e-5)
