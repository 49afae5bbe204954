"""Samples the next token of each row on the device, without sorting the vocabulary.

Probabilities are integers, in units of 2**-44 of the likeliest token's. So sums are exact, and a row's token
does not depend on the order of addition. Several programs search a row's likeliest token; one samples.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from loong.kernels.chain import chain_options, follow, let_next_start
from loong.kernels.contract import Dims
from loong.kernels.sampling.draw_params import DrawParams
from loong.kernels.sampling.philox import uniform
from loong.kernels.sampling.top_tokens import MAX_CANDIDATES, gather_candidates, keep_top, least_of_candidates

_BLOCK = 2048  # tokens at once
_NUM_PARTS = 16  # of a row, to look for its likeliest token
MAX_VOCABULARY = 2**19 - 1  # whose weights, all equal, still sum to less than 2**63
_ONE = tl.constexpr(float(2**44))  # the likeliest token's weight


@dataclass(frozen=True, slots=True)
class DrawWorkspace:
    """Space for sampling, made once, for use by one stream at a time."""

    weights: Tensor  # [N, V] int64
    candidate_logits: Tensor  # [N, C] float32, C = 4096
    candidate_weights: Tensor  # [N, C] int64
    candidates: Tensor  # [N, C] int64, token ids
    peaks: Tensor  # [N, 16] float32, the largest logit of each part of a row
    peak_tokens: Tensor  # [N, 16] int64

    @classmethod
    def empty(cls, max_num_rows: int, vocab_size: int, device: torch.device) -> "DrawWorkspace":
        """Return space for up to `max_num_rows` rows."""

        def room(width: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(max_num_rows, width, dtype=dtype, device=device)

        return cls(
            room(vocab_size, torch.int64),
            room(MAX_CANDIDATES.value, torch.float32),
            room(MAX_CANDIDATES.value, torch.int64),
            room(MAX_CANDIDATES.value, torch.int64),
            room(_NUM_PARTS, torch.float32),
            room(_NUM_PARTS, torch.int64),
        )


def draw(
    logits: Tensor, params: DrawParams, *, workspace: DrawWorkspace, tokens: Tensor, largest: Tensor
) -> None:
    """Choose the next token of each row; see `reference_draw.draw`.

    Contract:
        logits [N, V] float32, contiguous, V at most MAX_VOCABULARY.
        params: of N rows, in their limits (not checked).
        workspace: for N rows or more of V tokens; overwritten.
        tokens [N] int64 and largest [N] float32: written. `largest` is the row's largest logit, or infinity
            if one is NaN. Where it is not finite the token has no meaning.
        Does not wait for the host, and allocates nothing.
    """
    dims = Dims()
    dims.bind("logits", logits, "N V", torch.float32)
    dims.bind("workspace.weights", workspace.weights[: len(logits)], "N V", torch.int64)
    dims.bind("tokens", tokens, "N", torch.int64)
    dims.bind("largest", largest, "N", torch.float32)
    for name, tensor in params._asdict().items():
        is_whole = name in {"top_k", "seed", "position"}
        dims.bind(f"params.{name}", tensor, "N", torch.int64 if is_whole else torch.float64)
    if dims["V"] > MAX_VOCABULARY:
        raise ValueError(f"a vocabulary must have at most {MAX_VOCABULARY} tokens, got {dims['V']}")
    if dims["N"] == 0:
        return
    block = min(_BLOCK, max(_NUM_PARTS, triton.next_power_of_2(dims["V"])))
    _find_peaks[dims["N"], _NUM_PARTS](
        logits,
        workspace.peaks,
        workspace.peak_tokens,
        workspace.candidate_logits,
        dims["V"],
        block=block,
        num_parts=_NUM_PARTS,
        num_warps=max(1, block // 256),
        **chain_options(),
    )
    _draw_row[(dims["N"],)](
        logits,
        workspace.peaks,
        workspace.peak_tokens,
        *params,
        workspace.weights,
        workspace.candidate_logits,
        workspace.candidate_weights,
        workspace.candidates,
        tokens,
        largest,
        dims["V"],
        block=block,
        num_parts=_NUM_PARTS,
        num_warps=max(1, block // 128),
        **chain_options(),
    )


@triton.jit
def _find_peaks(
    logits: tl.tensor,
    peaks: tl.tensor,
    peak_tokens: tl.tensor,
    samples: tl.tensor,
    size: tl.tensor,
    block: tl.constexpr,
    num_parts: tl.constexpr,
    is_chained: tl.constexpr,
) -> None:
    """Write a part's largest logit, infinity if one is NaN, and the lowest id that has it.

    The `block` samples of a row are the largest logits of `block` classes of its tokens.
    """
    let_next_start(is_chained)
    follow(is_chained)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part_size = tl.cdiv(tl.cdiv(size, block), num_parts) * block
    best = tl.full([block], float("-inf"), tl.float32)
    best_token = tl.zeros([block], tl.int64)
    for start in tl.range(part * part_size, tl.minimum((part + 1) * part_size, size), block, num_stages=3):
        token = start + tl.arange(0, block)
        x = tl.load(logits + row * size + token, token < size, float("-inf"))
        x = tl.where(x == x, x, float("inf"))
        best_token = tl.where(x > best, token, best_token)
        best = tl.maximum(best, x)
    peak = tl.max(best, 0)
    place = row * num_parts + part
    tl.store(peaks + place, peak)
    tl.store(peak_tokens + place, tl.min(tl.where(best == peak, best_token, size), 0).to(tl.int64))
    num_samples: tl.constexpr = block // num_parts
    sample = tl.max(tl.reshape(best, [num_samples, num_parts]), 1)
    tl.store(samples + row * MAX_CANDIDATES + part * num_samples + tl.arange(0, num_samples), sample)


@triton.jit
def _draw_row(
    logits: tl.tensor,
    peaks: tl.tensor,
    peak_tokens: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,
    weights: tl.tensor,
    candidate_logits: tl.tensor,
    candidate_weights: tl.tensor,
    candidates: tl.tensor,
    tokens: tl.tensor,
    largest: tl.tensor,
    size: tl.tensor,
    block: tl.constexpr,
    num_parts: tl.constexpr,
    is_chained: tl.constexpr,
) -> None:
    follow(is_chained)
    row = tl.program_id(0).to(tl.int64)
    logits, weights = logits + row * size, weights + row * size
    candidate_logits += row * MAX_CANDIDATES
    candidate_weights += row * MAX_CANDIDATES
    candidates += row * MAX_CANDIDATES
    part = row * num_parts + tl.arange(0, num_parts)
    part_peaks = tl.load(peaks + part)
    peak = tl.max(part_peaks, 0)
    token = tl.min(tl.where(part_peaks == peak, tl.load(peak_tokens + part), size), 0)
    tl.store(largest + row, peak)
    degree = tl.load(temperature + row)
    if (degree > 0) & (tl.abs(peak) < float("inf")):
        total = _weigh(logits, weights, peak, degree, tl.load(min_p + row), size, block)
        count, share = tl.load(top_k + row), tl.load(top_p + row)
        num_tokens = tl.zeros([], tl.int64) + size
        is_gathered = False
        if (count < size) | (share < 1):
            key, weight = least_of_candidates(candidate_logits, total, count, share, size, block)
            num_candidates, sum_of_candidates = gather_candidates(
                logits, weights, key, weight, candidate_logits, candidate_weights, candidates, size, block
            )
            is_gathered = num_candidates <= MAX_CANDIDATES
            if is_gathered:
                logits, weights, num_tokens = candidate_logits, candidate_weights, num_candidates
                total = tl.where(count < size, sum_of_candidates, total)
        if count < num_tokens:
            total = keep_top(logits, weights, count.to(tl.float64), num_tokens, True, block)
        if share < 1:
            total = keep_top(logits, weights, share * total.to(tl.float64), num_tokens, False, block)
        chance = uniform(tl.load(seed + row), tl.load(position + row))
        target = tl.minimum((chance * total.to(tl.float64)).to(tl.int64), total - 1)
        token = _token_at(weights, target, num_tokens, block)
        if is_gathered:
            token = tl.load(candidates + token)
    tl.store(tokens + row, token)


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
def _token_at(weights: tl.tensor, target: tl.tensor, size: tl.tensor, block: tl.constexpr) -> tl.tensor:
    """Return the first token, in the order of ids, at which the sum of weights exceeds `target`."""
    token = tl.arange(0, block)
    weight = tl.load(weights + token, token < size, 0)
    passed, total = tl.zeros([], tl.int64), tl.sum(weight, 0)
    while passed + total <= target:
        passed += total
        token += block
        weight = tl.load(weights + token, token < size, 0)
        total = tl.sum(weight, 0)
    is_before = passed + tl.cumsum(weight, 0) <= target
    return tl.min(token, 0).to(tl.int64) + tl.sum(is_before.to(tl.int64), 0)
