"""The rotary embedding of a model, as in its config.json: one type for each kind of scaling."""

from collections.abc import Mapping
from typing import Annotated

import msgspec

from loong.core.errors import ConfigError

_Factor = Annotated[float, msgspec.Meta(ge=1.0)]
_NotNegative = Annotated[float, msgspec.Meta(ge=0.0)]
_Positive = Annotated[float, msgspec.Meta(gt=0.0)]
_Length = Annotated[int, msgspec.Meta(gt=0)]


class _Rope(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="rope_type", tag=True
):
    rope_theta: _Positive = 10000.0


class DefaultRope(_Rope, frozen=True, tag="default"):
    """Angles are `position * theta ** (-2i / head_dim)`."""


class LinearRope(_Rope, frozen=True, tag="linear"):
    """Positions are divided by `factor`."""

    factor: _Factor


class DynamicRope(_Rope, frozen=True, tag="dynamic"):
    """Theta grows with the sequence once it is longer than `original_max_position_embeddings`."""

    factor: _Factor
    original_max_position_embeddings: _Length


class Llama3Rope(_Rope, frozen=True, tag="llama3"):
    """Low frequencies are divided by `factor`, high ones are kept, and those between are blended."""

    factor: _Factor
    low_freq_factor: _Positive
    high_freq_factor: _Positive
    original_max_position_embeddings: _Length

    def __post_init__(self) -> None:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor must be above low_freq_factor={self.low_freq_factor}, "
                f"got {self.high_freq_factor}"
            )


class YarnRope(_Rope, frozen=True, tag="yarn"):
    """Like Llama 3's, along a ramp between two numbers of rotations. Cos and sin are scaled as well.

    A 0 among the last four numbers stands for none.
    """

    factor: _Factor
    original_max_position_embeddings: _Length
    attention_factor: _Positive | None = None
    beta_fast: _NotNegative | None = None
    beta_slow: _NotNegative | None = None
    mscale: _NotNegative | None = None
    mscale_all_dim: _NotNegative | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.rope_theta <= 1:
            raise ValueError(f"rope_theta must be above 1, got {self.rope_theta}")


RopeConfig = DefaultRope | LinearRope | DynamicRope | Llama3Rope | YarnRope
_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


def parse_rope(
    parameters: Mapping[str, object], *, rope_theta: float | None, max_position_embeddings: int
) -> RopeConfig:
    """Return Hugging Face's `rope_parameters`, or the older `rope_scaling` with a `rope_theta`.

    Raises ConfigError naming the key, its value and the supported values.
    """
    fields = {key: value for key, value in parameters.items() if key != "type" and value is not None}
    rope_type = fields.setdefault("rope_type", parameters.get("type", "default"))
    if rope_type not in _TYPES:
        raise ConfigError(f"rope_type must be one of {', '.join(_TYPES)}, got {rope_type!r}")
    if rope_theta is not None:
        fields.setdefault("rope_theta", rope_theta)
    if fields.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(
            f"partial_rotary_factor must be 1.0, got {parameters['partial_rotary_factor']!r}: "
            "only heads that are rotated whole are supported"
        )
    if rope_type == "dynamic":
        fields["original_max_position_embeddings"] = max_position_embeddings
    elif rope_type in ("llama3", "yarn"):
        original = fields.setdefault("original_max_position_embeddings", max_position_embeddings)
        if rope_type == "yarn" and isinstance(original, int) and original > 0:
            fields.setdefault("factor", max_position_embeddings / original)
    else:
        fields.pop("original_max_position_embeddings", None)
    try:
        rope: RopeConfig = msgspec.convert(fields, RopeConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"rope parameters {fields} cannot be used: {error}") from error
    return rope
