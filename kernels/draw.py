"""Drawing the next token of each row on the device, without sorting the vocabulary.

Probabilities are integers, in units of 2**-44 of the likeliest token's, so their sums are exact and a row's
token does not depend on the order of addition. What top-k and top-p keep is found by a search for the last
logit kept, two bits of it at a pass.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from loong.kernels.contract import Dims
from loong.kernels.draw_params import DrawParams
from loong.kernels.philox import uniform

_BLOCK = 4096  # tokens at once
_MAX_VOCABULARY = 2**18  # whose weights, all equal, still sum to less than 2**63
_ONE = tl.constexpr(float(2**44))  # the likeliest token's weight
_LOWEST_KEY = tl.constexpr(-(2**31))


def draw(logits: Tensor, params: DrawParams, *, weights: Tensor, tokens: Tensor, largest: Tensor) -> None:
    """Choose the next token of each row; see `reference.draw`.

    Contract:
        logits [N, V] float32, contiguous, V at most 2**18; params of N rows.
        weights [N, V] int64: overwritten. tokens [N] int64 and largest [N] float32: written; `largest` is the
            row's largest logit, or not finite if one is NaN. Where it is not finite the token means nothing.
        Needs nothing of the host and allocates nothing.
    """
    dims = Dims()
    dims.bind("logits", logits, "N V", torch.float32)
    dims.bind("weights", weights, "N V", torch.int64)
    dims.bind("tokens", tokens, "N", torch.int64)
    dims.bind("largest", largest, "N", torch.float32)
    for name, tensor in params._asdict().items():
        is_count = name in {"top_k", "seed", "position"}
        dims.bind(f"params.{name}", tensor, "N", torch.int64 if is_count else torch.float64)
    if dims["V"] > _MAX_VOCABULARY:
        raise ValueError(f"a vocabulary must have at most {_MAX_VOCABULARY} tokens, got {dims['V']}")
    if dims["N"] == 0:
        return
    block = min(_BLOCK, triton.next_power_of_2(dims["V"]))
    _draw_row[(dims["N"],)](
        logits, *params, weights, tokens, largest, dims["V"], block=block, num_warps=max(1, block // 256)
    )


@triton.jit
def _draw_row(
    logits: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,
    weights: tl.tensor,
    tokens: tl.tensor,
    largest: tl.tensor,
    size: tl.tensor,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    logits += row * size
    weights += row * size
    peak, token = _likeliest(logits, size, block)
    tl.store(largest + row, peak)
    degree = tl.load(temperature + row)
    if (degree > 0) & (tl.abs(peak) < float("inf")):
        total = _weigh(logits, weights, peak, degree, tl.load(min_p + row), size, block)
        count = tl.load(top_k + row)
        if count < size:
            total = _keep_top(logits, weights, count.to(tl.float64), size, True, block)
        share = tl.load(top_p + row)
        if share < 1:
            total = _keep_top(logits, weights, share * total.to(tl.float64), size, False, block)
        chance = uniform(tl.load(seed + row), tl.load(position + row))
        target = tl.minimum((chance * total.to(tl.float64)).to(tl.int64), total - 1)
        token = _token_at(weights, target, size, block)
    tl.store(tokens + row, token)


@triton.jit
def _likeliest(logits: tl.tensor, size: tl.tensor, block: tl.constexpr) -> tl.tuple:
    """Return the largest logit, infinite if one is NaN, and the lowest id that has it."""
    best = tl.full([block], float("-inf"), tl.float32)
    best_token = tl.zeros([block], tl.int64)
    for start in tl.range(0, size, block, num_stages=3):
        token = start + tl.arange(0, block)
        x = tl.load(logits + token, token < size, float("-inf"))
        x = tl.where(x == x, x, float("inf"))
        best_token = tl.where(x > best, token, best_token)
        best = tl.maximum(best, x)
    peak = tl.max(best, 0)
    return peak, tl.min(tl.where(best == peak, best_token, size), 0)


@triton.jit
def _weigh(
    logits: tl.tensor,
    weights: tl.tensor,
    peak: tl.tensor,
    temperature: tl.tensor,
    min_p: tl.tensor,
    size: tl.tensor,
    block: tl.constexpr,
) -> tl.tensor:
    """Write every token's weight after temperature and min-p, and return their sum."""
    total = tl.zeros([block], tl.int64)
    for start in tl.range(0, size, block, num_stages=3):
        token = start + tl.arange(0, block)
        x = tl.load(logits + token, token < size, float("-inf")).to(tl.float64)
        ratio = tl.exp((x - peak.to(tl.float64)) / temperature)
        weight = tl.where(ratio < min_p, 0, (ratio * _ONE).to(tl.int64))
        tl.store(weights + token, weight, token < size)
        total += weight
    tl.debug_barrier()
    return tl.sum(total, 0)


@triton.jit
def _keep_top(
    logits: tl.tensor,
    weights: tl.tensor,
    limit: tl.tensor,
    size: tl.tensor,
    is_count: tl.constexpr,
    block: tl.constexpr,
) -> tl.tensor:
    """Keep the tokens before which, likeliest first, less than `limit` is kept; return the sum of weights.

    It is counted in tokens, or else in weights; of equals the lowest ids come first.
    """
    last = _last_key(logits, weights, limit, size, is_count, block)
    before, _, _ = _sums_above(logits, weights, last - 1, 1, size, is_count, block)
    total = tl.zeros([block], tl.int64)
    for start in tl.range(0, size, block):
        token = start + tl.arange(0, block)
        key, value, weight = _load_tokens(logits, weights, token, size, is_count)
        equal = tl.where(key == last, value, 0)
        before_token = before + tl.cumsum(equal, 0) - equal
        is_kept = (key > last) | ((key == last) & (before_token.to(tl.float64) < limit))
        weight = tl.where(is_kept, weight, 0)
        tl.store(weights + token, weight, token < size)
        total += weight
        before += tl.sum(equal, 0)
    tl.debug_barrier()
    return tl.sum(total, 0)


@triton.jit
def _last_key(
    logits: tl.tensor,
    weights: tl.tensor,
    limit: tl.tensor,
    size: tl.tensor,
    is_count: tl.constexpr,
    block: tl.constexpr,
) -> tl.tensor:
    """Return the smallest key above which there is less than `limit`."""
    last = tl.full([], _LOWEST_KEY, tl.int64)
    width = tl.full([], 2**30, tl.int64)
    for _ in tl.range(0, 16):
        a, b, c = _sums_above(logits, weights, last - 1, width, size, is_count, block)
        last += (
            _is_at_least(a, limit) * width + _is_at_least(b, limit) * width + _is_at_least(c, limit) * width
        )
        width = width // 4
    return last


@triton.jit
def _is_at_least(value: tl.tensor, limit: tl.tensor) -> tl.tensor:
    return (value.to(tl.float64) >= limit).to(tl.int64)


@triton.jit
def _sums_above(
    logits: tl.tensor,
    weights: tl.tensor,
    base: tl.tensor,
    width: tl.tensor,
    size: tl.tensor,
    is_count: tl.constexpr,
    block: tl.constexpr,
) -> tl.tuple:
    """Return what lies above the keys base + width, base + 2 width and base + 3 width."""
    a, b, c = tl.zeros([block], tl.int64), tl.zeros([block], tl.int64), tl.zeros([block], tl.int64)
    for start in tl.range(0, size, block, num_stages=3):
        token = start + tl.arange(0, block)
        key, value, _ = _load_tokens(logits, weights, token, size, is_count)
        a += tl.where(key > base + width, value, 0)
        b += tl.where(key > base + 2 * width, value, 0)
        c += tl.where(key > base + 3 * width, value, 0)
    return tl.sum(a, 0), tl.sum(b, 0), tl.sum(c, 0)


@triton.jit
def _load_tokens(
    logits: tl.tensor, weights: tl.tensor, token: tl.tensor, size: tl.tensor, is_count: tl.constexpr
) -> tl.tuple:
    """Return keys in the order of the logits, what tokens count, and their weights; all int64."""
    is_token = token < size
    x = tl.load(logits + token, is_token, float("-inf")) + 0.0  # so that -0 becomes 0, which it equals
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    weight = tl.load(weights + token, is_token, 0)
    return key, is_token.to(tl.int64) if is_count else weight, weight


@triton.jit
def _token_at(weights: tl.tensor, target: tl.tensor, size: tl.tensor, block: tl.constexpr) -> tl.tensor:
    """Return the first token up to which, in the order of ids, more than `target` has been passed."""
    passed = tl.zeros([], tl.int64)
    num_before = tl.zeros([], tl.int64)
    for start in tl.range(0, size, block):
        token = start + tl.arange(0, block)
        weight = tl.load(weights + token, token < size, 0)
        is_before = (passed + tl.cumsum(weight, 0) <= target) & (token < size)
        num_before += tl.sum(is_before.to(tl.int64), 0)
        passed += tl.sum(weight, 0)
    return num_before
