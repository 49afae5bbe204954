"""The rotary embedding of a GGUF file, scaled by its metadata or by factors in a tensor."""

import numpy as np

from loong.core.errors import ConfigError
from loong.model.gguf.header import Header
from loong.model.gguf.metadata import Metadata
from loong.model.gguf.quantization import read_tensor
from loong.model.rope_config import DefaultRope, Llama3Rope, RopeConfig, parse_rope

FREQUENCY_FACTORS = "rope_freqs.weight"  # the tensor of a rope scaling
_DEFAULT_THETA = 10000.0
# Llama 3.1 to 3.3 differ only in their factor. A file has the factors that follow from these four numbers.
_LLAMA3_LENGTH, _LLAMA3_LOW, _LLAMA3_HIGH = 8192, 1.0, 4.0


def read_rope(metadata: Metadata, header: Header, head_dim: int) -> RopeConfig:
    """Return the rotary embedding. Raises ConfigError naming an unsupported key or tensor.

    As in llama.cpp, a factor without a type is linear, and one of 0 is none.
    """
    prefix = f"{metadata.architecture}.rope"
    theta = metadata.optional(f"{prefix}.freq_base", float)
    factor = metadata.optional(f"{prefix}.scaling.factor", float)
    if factor is None:
        factor = metadata.optional(f"{prefix}.scale_linear", float)  # its former name
    scaling = metadata.optional(f"{prefix}.scaling.type", str) or "linear"
    if scaling not in ("none", "linear", "yarn"):
        raise metadata.refusal(f"{prefix}.scaling.type", "one of none, linear, yarn")
    context_length = metadata.size(f"{metadata.architecture}.context_length")
    parameters: dict[str, object] = {"rope_type": "default"}
    if scaling != "none" and factor not in (None, 0.0, 1.0):
        original = metadata.optional(f"{prefix}.scaling.original_context_length", int)
        parameters = {
            "rope_type": scaling,
            "factor": factor,
            "original_max_position_embeddings": original,
        }
    try:
        rope = parse_rope(
            parameters,
            rope_theta=_DEFAULT_THETA if theta is None else theta,
            max_position_embeddings=context_length,
        )
    except ConfigError as error:
        raise ConfigError(f"{metadata.path}: {error}") from error
    if FREQUENCY_FACTORS not in header.tensors:
        return rope
    if not isinstance(rope, DefaultRope):
        raise ConfigError(f"{metadata.path}: {FREQUENCY_FACTORS} with {prefix}.scaling is not supported")
    return _llama3_rope(header, rope.rope_theta, head_dim)


def _llama3_rope(header: Header, theta: float, head_dim: int) -> Llama3Rope:
    """Return the scaling whose frequencies are the default ones divided by the file's factors."""
    import torch  # not at the top: most processes that read configs do not need it

    from loong.model.rope import make_rotary

    wanted = (head_dim // 2,)
    if (shape := header.tensors[FREQUENCY_FACTORS].shape) != wanted:
        raise ConfigError(
            f"{header.path}: {FREQUENCY_FACTORS} must have shape {list(wanted)}, got {list(shape)}"
        )
    factors = read_tensor(header, FREQUENCY_FACTORS)
    if not (np.isfinite(factors).all() and factors.min() > 0):
        raise ConfigError(f"{header.path}: {FREQUENCY_FACTORS} must have finite factors above 0")
    rope = Llama3Rope(
        rope_theta=theta,
        factor=max(1.0, float(factors.max())),
        low_freq_factor=_LLAMA3_LOW,
        high_freq_factor=_LLAMA3_HIGH,
        original_max_position_embeddings=_LLAMA3_LENGTH,
    )
    default, scaled = (
        make_rotary(each, head_dim, torch.float32, torch.device("cpu")).frequencies.numpy()
        for each in (DefaultRope(rope_theta=theta), rope)
    )
    if not np.allclose(default / factors, scaled, rtol=1e-4):
        raise ConfigError(
            f"{header.path}: {FREQUENCY_FACTORS} must have the factors of Llama 3's rope scaling for an "
            f"original length of {_LLAMA3_LENGTH}; other ones are not supported"
        )
    return rope
