"""Cosines and sines of token positions."""

import math
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from loong.model.config import ModelConfig
from loong.model.rope_config import DefaultRope, DynamicRope, LinearRope, Llama3Rope, RopeConfig, YarnRope


@dataclass(frozen=True, slots=True)
class Rotary:
    """The rotary embedding of one model; made by `make_rotary`."""

    rope: RopeConfig
    frequencies: Tensor  # [D / 2] float32, radians a position
    magnitude: float  # scales cos and sin, and so attention scores by its square
    dtype: torch.dtype

    def __call__(self, positions: Tensor, sequence_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin [T, D] in the model's dtype, computed in float32.

        positions [T] int64. sequence_lengths [T] int64, max(num_prompt_tokens, position + 1): the length of
        each token's sequence when the token was first computed. Only dynamic scaling uses it, so that chunks,
        recomputation and placement do not change a token's angles.
        """
        frequencies = self.frequencies
        if isinstance(self.rope, DynamicRope):
            frequencies = _dynamic_frequencies(self.rope, 2 * len(frequencies), sequence_lengths)
        angles = positions[:, None].float() * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self.magnitude).to(self.dtype), (angles.sin() * self.magnitude).to(self.dtype)


@dataclass(frozen=True, slots=True)
class LayerRotary:
    """The rotary embeddings of all layers, of which those with a window may have another."""

    usual: Rotary
    local: Rotary | None
    is_local: tuple[bool, ...]  # of each layer

    def __call__(self, positions: Tensor, sequence_lengths: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return cos and sin of each layer; see `Rotary`."""
        angles = local_angles = self.usual(positions, sequence_lengths)
        if self.local is not None:
            local_angles = self.local(positions, sequence_lengths)
        return [local_angles if is_local else angles for is_local in self.is_local]


def layer_rotary(config: ModelConfig, device: torch.device) -> LayerRotary:
    """Return the rotary embeddings of a model's layers, on `device`."""

    def made(rope: RopeConfig) -> Rotary:
        return make_rotary(rope, config.head_dim, config.torch_dtype, device, config.scales.scores)

    local = None if config.local_rope is None else made(config.local_rope)
    windows = config.layer_windows or (None,) * config.num_layers
    return LayerRotary(made(config.rope), local, tuple(window is not None for window in windows))


def make_rotary(
    rope: RopeConfig,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    score_scale: float | None = None,
) -> Rotary:
    """Return the rotary embedding that `rope` describes, on `device`.

    Attention scales scores by 1 / sqrt(head_dim). If the model's `score_scale` is another, angles make up for
    it, in queries and keys alike.
    """
    default = 1.0 / _wavelengths(rope.rope_theta, head_dim)
    magnitude = 1.0
    match rope:
        case DefaultRope() | DynamicRope():
            frequencies = default
        case LinearRope():
            frequencies = default / rope.factor
        case Llama3Rope():
            frequencies = _llama3_frequencies(rope, default)
        case YarnRope():
            frequencies = _yarn_frequencies(rope, default)
            magnitude = _yarn_magnitude(rope)
        case _:
            assert_never(rope)
    if score_scale is not None:
        magnitude *= math.sqrt(score_scale * math.sqrt(head_dim))
    return Rotary(rope, frequencies.to(device), magnitude, dtype)


def _wavelengths(theta: float | Tensor, head_dim: int, device: torch.device | None = None) -> Tensor:
    """Return positions per radian [..., D / 2]."""
    return theta ** (torch.arange(0, head_dim, 2, device=device).float() / head_dim)


def _dynamic_frequencies(rope: DynamicRope, head_dim: int, sequence_lengths: Tensor) -> Tensor:
    """Return frequencies [T, D / 2]: the default ones up to the original length, slower beyond.

    They are in float64, because the position multiplies rounding errors of the power.
    """
    original = rope.original_max_position_embeddings
    lengths = sequence_lengths.clamp(min=original).double()[:, None]
    stretch = rope.factor * lengths / original - (rope.factor - 1)
    theta = rope.rope_theta * stretch ** (head_dim / (head_dim - 2))
    return (1.0 / _wavelengths(theta, head_dim, sequence_lengths.device)).float()


def _llama3_frequencies(rope: Llama3Rope, default: Tensor) -> Tensor:
    """Return frequencies blended by their number of rotations within the original length."""
    turns = default * rope.original_max_position_embeddings / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0, 1)
    return default * (kept + (1 - kept) / rope.factor)


def _yarn_frequencies(rope: YarnRope, default: Tensor) -> Tensor:
    """Return frequencies blended along a ramp between those with `beta_fast` and `beta_slow` rotations."""
    head_dim = 2 * len(default)

    def dimension_of(num_turns: float) -> float:
        wavelength = rope.original_max_position_embeddings / (2 * math.pi * num_turns)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.rope_theta))

    low, high = dimension_of(rope.beta_fast or 32.0), dimension_of(rope.beta_slow or 1.0)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    kept = 1 - ((torch.arange(head_dim // 2) - low) / width).clamp(0, 1)
    return default * (kept + (1 - kept) / rope.factor)


def _yarn_magnitude(rope: YarnRope) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def magnitude(slope: float) -> float:
        return 0.1 * slope * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)
