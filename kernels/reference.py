"""The definition of every kernel in plain torch, which CPUs run as well."""

from itertools import pairwise
from typing import assert_never

import torch
from torch import Tensor
from torch.nn import functional as F

from loong.core.activation import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation
from loong.kernels.attend_task import AttendTask
from loong.kernels.contract import Dims
from loong.kernels.expert_groups import ExpertGroups
from loong.kernels.fp8_rows import FP8, LARGEST, LEAST_SCALE
from loong.kernels.kv_rows import dequantized, has_fp8, quantized
from loong.kernels.partial import Partial
from loong.kernels.shared_table import SharedTable
from loong.kernels.slots import SlotLists

_MAX_SCORES = 1 << 19  # scores in memory at once: 2 MiB of float32 fit a CPU's cache


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    q_positions: Tensor | None = None,
    kv_positions: Tensor | None = None,
    window: int | None = None,
) -> Partial:
    """Attend a block of queries to one KV segment.

    Contract:
        q [T, H, D]; k, v [S, K, D] of q's dtype; any strides; H a multiple of K, and query head h reads
            KV head h // (H / K). T and S may be 0.
        q_positions [T], kv_positions [S] int64, in any order: a key is visible iff
            kv_position <= q_position, and with a `window` q_position - kv_position < window as well. Both
            None: every key is visible. One None: ValueError.
        Returns a new Partial; a row that sees no key is (0, -inf). Accumulates in float32.
    """
    dims = Dims()
    dims.bind("q", q, "T H D", is_contiguous=False)
    dims.bind("k", k, "S K D", q.dtype, is_contiguous=False)
    dims.bind("v", v, "S K D", q.dtype, is_contiguous=False)
    dims.group_size()
    if (q_positions is None) != (kv_positions is None):
        raise ValueError("q_positions and kv_positions must be given together")
    if q_positions is not None and kv_positions is not None:
        dims.bind("q_positions", q_positions, "T", torch.int64, is_contiguous=False)
        dims.bind("kv_positions", kv_positions, "S", torch.int64, is_contiguous=False)
    if dims["T"] * dims["H"] * dims["S"] <= _MAX_SCORES:
        return _attend_block(q, k, v, scale, _visible(q_positions, kv_positions, window))
    return _attend_by_blocks(q, k, v, scale, q_positions, kv_positions, window)


def _visible(
    q_positions: Tensor | None, kv_positions: Tensor | None, window: int | None = None
) -> Tensor | None:
    """Return which key each query sees [T, S], or None for all."""
    if q_positions is None or kv_positions is None:
        return None
    is_before = kv_positions <= q_positions[:, None]
    return is_before if window is None else is_before & (kv_positions > q_positions[:, None] - window)


def _attend_by_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    q_positions: Tensor | None,
    kv_positions: Tensor | None,
    window: int | None,
) -> Partial:
    num_tokens, num_heads, head_dim = q.shape
    partial = Partial.identity(num_tokens, num_heads, head_dim, q.device)
    block_size = max(1, _MAX_SCORES // (num_heads * len(k)))
    for start in range(0, num_tokens, block_size):
        rows = slice(start, start + block_size)
        if q_positions is None or kv_positions is None:
            block = _attend_block(q[rows], k, v, scale, None)
        else:
            seen = (kv_positions <= q_positions[rows].max()).nonzero()
            end = int(seen[-1]) + 1 if len(seen) else 0  # no row sees keys from here on
            visible = _visible(q_positions[rows], kv_positions[:end], window)
            block = _attend_block(q[rows], k[:end], v[:end], scale, visible)
        partial.out[rows], partial.lse[rows] = block
    return partial


def _attend_block(q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor | None) -> Partial:
    num_tokens, num_heads, head_dim = q.shape
    num_kv_tokens, num_kv_heads, _ = k.shape
    if num_tokens == 0 or num_kv_tokens == 0:
        return Partial.identity(num_tokens, num_heads, head_dim, q.device)
    # All query heads that share a KV head become rows of one matrix, so that no KV is repeated.
    rows = (q.float() * scale).view(num_tokens, num_kv_heads, -1, head_dim).transpose(0, 1)
    scores = rows.reshape(num_kv_heads, -1, head_dim) @ k.float().permute(1, 2, 0)  # [K, T * H / K, S]
    if visible is not None:
        scores.view(num_kv_heads, num_tokens, -1, num_kv_tokens).masked_fill_(~visible[:, None], -torch.inf)
    largest = scores.amax(-1, keepdim=True)
    if visible is not None:
        largest = largest.where(largest > -torch.inf, 0.0)  # so that a row of -inf becomes 0, not NaN
    weights = scores.sub_(largest).exp_()
    total = weights.sum(-1, keepdim=True)  # at least 1, or 0 in a row that sees nothing
    out = (weights @ v.float().transpose(0, 1)) / total.clamp(min=1.0)
    lse = largest + total.log()
    return Partial(_rows_to_tokens(out, num_tokens), _rows_to_tokens(lse, num_tokens).squeeze(-1))


def _rows_to_tokens(rows: Tensor, num_tokens: int) -> Tensor:
    num_kv_heads, _, width = rows.shape
    return rows.view(num_kv_heads, num_tokens, -1, width).transpose(0, 1).reshape(num_tokens, -1, width)


def attend_slots(q: Tensor, kv: Tensor, lists: SlotLists, *, scale: float) -> Partial:
    """Attend one query of each request, q [B, H, D], to its slots of a pool, kv [num_slots, 2, K, D]."""
    rows = (_with_rows(q[b : b + 1], kv[lists.list_of(b)]) for b in range(len(q)))
    parts = [attend(*each, scale=scale) for each in rows]
    return Partial(torch.cat([part.out for part in parts]), torch.cat([part.lse for part in parts]))


def _with_rows(q: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, and keys and values of rows of either kind; all in float32 if the rows are in FP8."""
    if not has_fp8(rows):
        return q, rows[:, 0], rows[:, 1]
    keys, values = dequantized(rows, q.shape[2]).unbind(1)
    return q.float(), keys, values


def attend_blocks(
    q: Tensor,
    kv: Tensor,
    tasks: Tensor,
    *,
    scale: float,
    total: Partial,
    slots: Tensor | None = None,
    window: int | None = None,
) -> None:
    """Merge the attention of tasks [C, 8], lines of `AttendTask`, over kv [S, 2, K, D] into `total`.

    With a `window`, queries see only keys of that many positions, up to their own.
    """
    for line in tasks.tolist():
        task = AttendTask(*line)
        if not task.num_queries:
            continue
        queries = slice(task.query_row, task.query_row + task.num_queries)
        keys = torch.arange(task.num_keys, device=q.device)
        rows = task.key_row + keys if slots is None else slots[task.key_row + keys]
        part = attend(
            *_with_rows(q[queries], kv[rows]),
            scale=scale,
            q_positions=task.first_query + task.query_step * torch.arange(task.num_queries, device=q.device),
            kv_positions=task.first_key + task.key_step * keys,
            window=window,
        )
        before = _cleared(Partial(total.out[queries], total.lse[queries]))
        total.out[queries], total.lse[queries] = merge(before, part)


def attend_shared(q: Tensor, kv: Tensor, table: SharedTable, *, scale: float, total: Partial) -> None:
    """Merge attention of the queries of each group to its slots of kv [S, 2, K, D] into `total`.

    `total` is float32 and has the T rows of q [T, H, D]. The keys of a group are read once for all its
    queries.
    """
    for line in table.tasks.tolist():
        task = AttendTask(*line)
        if not task.num_queries:
            continue
        first = task.query_row % len(table.rows)
        rows = table.rows[first : first + task.num_queries]
        keys = kv[table.slots[task.key_row : task.key_row + task.num_keys]]
        part = attend(*_with_rows(q[rows], keys), scale=scale)
        merge_into(total, Partial(part.out[None], part.lse[None]), rows)


def merge(a: Partial, b: Partial) -> Partial:
    """Combine attention over two disjoint sets of KV: associative, commutative, with `Partial.identity`.

    Contract:
        a, b: out [T, H, D] float32 and lse [T, H] float32, any strides.
        Returns a new Partial. Neither input is changed.
    """
    dims = Dims()
    for name, partial in (("a", a), ("b", b)):
        dims.bind(f"{name}.out", partial.out, "T H D", torch.float32, is_contiguous=False)
        dims.bind(f"{name}.lse", partial.lse, "T H", torch.float32, is_contiguous=False)
    largest = torch.maximum(a.lse, b.lse)
    largest = largest.where(largest > -torch.inf, 0.0)
    weight_a, weight_b = (a.lse - largest).exp(), (b.lse - largest).exp()
    total = weight_a + weight_b  # at least 1, or 0 in a row that neither side has seen
    divisor = total.clamp(min=1.0)
    out = a.out * (weight_a / divisor)[..., None] + b.out * (weight_b / divisor)[..., None]
    return Partial(out, largest + total.log())


def merge_into(total: Partial, parts: Partial, rows: Tensor | None = None) -> None:
    """Merge parts, out [N, T, H, D] and lse [N, T, H], into rows [T] of `total`. Rows below 0 are skipped.

    None: into all rows, in order.
    """
    place: Tensor | slice = slice(None)
    if rows is not None:
        place, parts = rows[rows >= 0], Partial(*(tensor[:, rows >= 0] for tensor in parts))
    merged = _cleared(Partial(total.out[place], total.lse[place]))
    for part in zip(*parts, strict=True):
        merged = merge(merged, _cleared(Partial(*part)))
    total.out[place], total.lse[place] = merged


def add_sinks(total: Partial, sinks: Tensor) -> None:
    """Merge one more key into every row of total [T, H, D]: of the logits sinks [H], and the value 0."""
    lse = sinks.expand_as(total.lse)
    cleared = _cleared(total)
    total.out[:], total.lse[:] = merge(cleared, Partial(torch.zeros_like(cleared.out), lse))


def _cleared(partial: Partial) -> Partial:
    """Return a partial in float32, with 0 in rows without KV, which may be uninitialized."""
    return partial._replace(out=partial.out.float().where(partial.lse[..., None] > -torch.inf, 0.0))


def copy_rows(
    source: Tensor,
    target: Tensor,
    *,
    source_rows: Tensor | None = None,
    target_rows: Tensor | None = None,
    num_rows: Tensor | None = None,
) -> None:
    """Copy `target[target_rows[t]] = source[source_rows[t]]`. Target rows below 0 are skipped.

    Copies only the first `num_rows` [1] tokens, if given.
    """
    if num_rows is not None:
        some = slice(int(num_rows))
        source_rows, source = (None, source[some]) if source_rows is None else (source_rows[some], source)
        target_rows, target = (None, target[some]) if target_rows is None else (target_rows[some], target)
    given = source if source_rows is None else source[source_rows]
    if target_rows is None:
        target.copy_(given[: len(target)])
    else:
        target[target_rows[target_rows >= 0]] = given[target_rows >= 0]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale the last dim to unit root mean square, then by `weight`.

    Contract:
        x [..., E] and weight [E] of its dtype or float32. Computed in float32 and rounded to the weight's
        dtype before the multiplication with it, which is Hugging Face's order, and after it to x's.
    """
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * scaled.to(weight.dtype)).to(x.dtype)


def add_rms_norm(residual: Tensor, weight: Tensor, eps: float, *, out: Tensor, added: Tensor | None) -> None:
    """Add `added`, if given, to residual [T, E] in place, and write the norm of the sum to `out`."""
    if added is not None:
        residual += added
    out.copy_(rms_norm(residual, weight, eps))


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head of each token by that token's angles.

    Contract:
        x [T, H, D]; cos, sin [T, D] of x's dtype, whose two halves are the same D / 2 angles: dimension i
        is paired with i + D / 2. Returns a new tensor of x's dtype, rounded after every operation.
    """
    dims = Dims()
    dims.bind("x", x, "T H D", is_contiguous=False)
    dims.bind("cos", cos, "T D", x.dtype, is_contiguous=False)
    dims.bind("sin", sin, "T D", x.dtype, is_contiguous=False)
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [M, K] times weight [N, K] transposed, plus bias [N]: [M, N] in their dtype, rounded once."""
    wide = x.float() @ weight.float().T
    return (wide if bias is None else wide + bias.float()).to(x.dtype)


def choose_experts(logits: Tensor, *, is_normalized: bool, chosen: Tensor, weights: Tensor) -> None:
    """Write the C largest shares of logits [T, X] to weights [T, C], and whose they are to chosen [T, C].

    Shares are by softmax over X. `is_normalized`: those of the chosen sum to 1.
    """
    shares, experts = logits.softmax(-1, dtype=torch.float32).topk(chosen.shape[1], dim=-1)
    chosen.copy_(experts)
    weights.copy_(shares / shares.sum(-1, keepdim=True) if is_normalized else shares)


def grouped_linear(x: Tensor, weight: Tensor, groups: ExpertGroups, *, out: Tensor) -> None:
    """Write x [M, K] times weight [X, N, K] of each pair's expert, transposed, to out [P, N]."""
    ends, pairs_a_row = groups.starts.tolist(), len(groups.pairs) // max(1, len(x))
    for expert, (start, end) in enumerate(pairwise(ends)):
        if start < end:
            pairs = groups.pairs[start:end]
            out[pairs] = F.linear(x[pairs // pairs_a_row], weight[expert])


def quantize_rows(x: Tensor, group_size: int, *, values: Tensor, scales: Tensor) -> None:
    """Write x [T, K] as FP8 values [T, K] times scales [T, G], by which each group's largest is 448."""
    for group, part in enumerate(torch.split(x.float(), group_size, dim=1)):
        scale = (part.abs().amax(1) / LARGEST).clamp(min=LEAST_SCALE)
        scales[:, group] = scale
        first = group * group_size
        values[:, first : first + part.shape[1]] = (part / scale[:, None]).to(FP8)


def fp8_linear(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    *,
    group_size: int,
    groups: ExpertGroups | None,
    out: Tensor,
) -> None:
    """Write the product of x [M, K] and weight [X, N, K], each times its scales [..., G], to out [P, N]."""
    wide_x, wide_weight = (
        _dequantized(x, x_scales, group_size),
        _dequantized(weight, weight_scales, group_size),
    )
    if groups is None:
        out.copy_(F.linear(wide_x, wide_weight[0]))
        return
    wide = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    grouped_linear(wide_x, wide_weight, groups, out=wide)
    out.copy_(wide)


def _dequantized(values: Tensor, scales: Tensor, group_size: int) -> Tensor:
    return values.float() * scales.repeat_interleave(group_size, dim=-1)[..., : values.shape[-1]]


def expert_sum(parts: Tensor, weights: Tensor, *, out: Tensor) -> None:
    """Write the sum over C of weights [T, C] float32 times parts [T, C, E] to out [T, E], rounded once."""
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for part, weight in zip(parts.unbind(1), weights.unbind(1), strict=True):
        total += weight[:, None] * part.float()
    out.copy_(total)


def activate_and_mul(gate: Tensor, up: Tensor, activation: Activation = Activation.SILU) -> Tensor:
    """Return the activated gate times `up`, elementwise, in their dtype, rounded after the activation."""
    match activation:
        case Activation.SILU:
            return F.silu(gate) * up
        case Activation.GELU_TANH:
            return F.gelu(gate, approximate="tanh") * up
        case Activation.CLAMPED_SWIGLU:
            gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
            return gate * torch.sigmoid(gate * SWIGLU_ALPHA) * (up + 1)
        case _:
            assert_never(activation)


def rotate_and_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    q: Tensor,
    kv: Tensor,
    rows: Tensor,
    bias: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Finish the heads of qkv [T, H + 2 K, D]; write q, and kv for tokens whose row is not below 0.

    Rows of kv are [S, 2, K, D], or in FP8 with a scale of each token and head; see `kv_rows`.
    """
    num_heads = q.shape[1]
    num_kv_heads = (qkv.shape[1] - num_heads) // 2
    heads = qkv if bias is None else qkv + bias
    queries, keys, values = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        queries, keys = rms_norm(queries, q_norm, eps), rms_norm(keys, k_norm, eps)
    q.copy_(apply_rotary(queries, cos, sin))
    new = torch.stack((apply_rotary(keys, cos, sin), values), dim=1)
    stored = new[rows >= 0]
    kv[rows[rows >= 0]] = quantized(stored) if has_fp8(kv) else stored
