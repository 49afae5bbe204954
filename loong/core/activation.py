"""The activations of gated MLPs."""

from enum import StrEnum
from typing import Final

SWIGLU_ALPHA: Final = 1.702
SWIGLU_LIMIT: Final = 7.0


class Activation(StrEnum):
    """The function of a gate, by which the other half of a projection is multiplied.

    CLAMPED_SWIGLU: of gpt-oss, `gate * sigmoid(1.702 * gate) * (up + 1)`, where gates are at most 7 and ups
    are between -7 and 7.
    """

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    CLAMPED_SWIGLU = "clamped_swiglu"
