"""Top-k and top-p of a row of logits, without sorting it.

Logits are compared as integers, called keys, in the same order. The last kept key is found by a search with
two bits a pass, preferably among the few candidates that can be kept at all.
"""

import triton
import triton.language as tl

MAX_CANDIDATES = tl.constexpr(4096)  # of a row; beyond this number the whole row is searched
_LOWEST_KEY = tl.constexpr(-(2**31))
_HIGHEST_KEY = tl.constexpr(2**31 - 1)


@triton.jit
def least_of_candidates(
    samples: tl.tensor,
    total: tl.tensor,
    count: tl.tensor,
    share: tl.tensor,
    size: tl.tensor,
    block: tl.constexpr,
) -> tl.tuple:
    """Return the least key and the least weight that a token needs to be kept.

    The `count`th of the samples is not larger than the `count`th of all. Top-p cuts a token that weighs less
    than an even share of the weight to cut, because no later token weighs more. Half of that allows for
    rounding.
    """
    key = tl.full([], _LOWEST_KEY, tl.int64)
    weight = tl.full([], 1, tl.int64)
    if count >= size:
        weight = tl.maximum(((1 - share) * total.to(tl.float64) / size / 2).to(tl.int64), 1)
    elif count < block:
        key = _last_key(samples, samples, count.to(tl.float64), block, True, block)
    return key, weight


@triton.jit
def gather_candidates(
    logits: tl.tensor,
    weights: tl.tensor,
    least_key: tl.tensor,
    least_weight: tl.tensor,
    candidate_logits: tl.tensor,
    candidate_weights: tl.tensor,
    candidates: tl.tensor,
    size: tl.tensor,
    block: tl.constexpr,
) -> tl.tuple:
    """Copy candidates, in the order of ids, up to the capacity; return their number and sum."""
    num_candidates = tl.zeros([], tl.int64)
    total = tl.zeros([block], tl.int64)
    for start in tl.range(0, size, block):
        token = start + tl.arange(0, block)
        key = _load_keys(logits, token, size)
        weight = tl.load(weights + token, token < size, 0)
        is_candidate = (token < size) & (key >= least_key) & (weight >= least_weight)
        one = is_candidate.to(tl.int32)
        place = num_candidates + tl.cumsum(one, 0) - one
        has_room = is_candidate & (place < MAX_CANDIDATES)
        tl.store(candidate_logits + place, tl.load(logits + token, token < size, 0.0), has_room)
        tl.store(candidate_weights + place, weight, has_room)
        tl.store(candidates + place, token.to(tl.int64), has_room)
        num_candidates += tl.sum(one, 0)
        total += tl.where(is_candidate, weight, 0)
    tl.debug_barrier()
    return num_candidates, tl.sum(total, 0)


@triton.jit
def keep_top(
    logits: tl.tensor,
    weights: tl.tensor,
    limit: tl.tensor,
    size: tl.tensor,
    is_count: tl.constexpr,
    block: tl.constexpr,
) -> tl.tensor:
    """Keep the tokens before which, likeliest first, less than `limit` is kept; return the sum of weights.

    `limit` is a number of tokens, or else a weight. Of equal tokens, the lowest ids come first.
    """
    last = _last_key(logits, weights, limit, size, is_count, block)
    before, _, _ = _sums_above(logits, weights, last - 1, 1, size, is_count, block)
    total = tl.zeros([block], tl.int64)
    for start in tl.range(0, size, block):
        token = start + tl.arange(0, block)
        key = _load_keys(logits, token, size)
        value = _load_values(weights, token, size, is_count)
        weight = tl.load(weights + token, token < size, 0)
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
    """Return the smallest key above which the kept amount is less than `limit`."""
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
    """Return the amounts above the keys base + width, base + 2 width and base + 3 width."""
    key_a, key_b, key_c = _key(base + width), _key(base + 2 * width), _key(base + 3 * width)
    a, b, c = tl.zeros([block], tl.int64), tl.zeros([block], tl.int64), tl.zeros([block], tl.int64)
    for start in tl.range(0, size, block, num_stages=3):
        token = start + tl.arange(0, block)
        key = _load_keys(logits, token, size)
        value = _load_values(weights, token, size, is_count)
        a += tl.where(key > key_a, value, 0)
        b += tl.where(key > key_b, value, 0)
        c += tl.where(key > key_c, value, 0)
    return tl.sum(a, 0), tl.sum(b, 0), tl.sum(c, 0)


@triton.jit
def _key(key: tl.tensor) -> tl.tensor:
    """Return an int64 key, limited to the range of keys, as int32."""
    return tl.minimum(tl.maximum(key, _LOWEST_KEY), _HIGHEST_KEY).to(tl.int32)


@triton.jit
def _load_keys(logits: tl.tensor, token: tl.tensor, size: tl.tensor) -> tl.tensor:
    """Return keys as int32 in the order of the logits."""
    x = tl.load(logits + token, token < size, float("-inf")) + 0.0  # so that -0 becomes 0
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _load_values(weights: tl.tensor, token: tl.tensor, size: tl.tensor, is_count: tl.constexpr) -> tl.tensor:
    """Return the counted amount of tokens, int64: 1 for each token, or their weights."""
    is_token = token < size
    return is_token.to(tl.int64) if is_count else tl.load(weights + token, is_token, 0)
