"""The memory of keys and values, as all but a model and its kernels know it."""

from dataclasses import dataclass
from math import prod

from loong.core.errors import ConfigError

ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1}
_WORD_BYTES = 8  # a pool copies rows by words


def row_of_heads(num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
    """Return the shape of a row with the keys of all heads, followed by their values."""
    return 2, num_kv_heads, head_dim


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The keys and values of a token on one rank: in each layer a row of `row_shape`, without gaps.

    A model makes it. Only the kernels that write and attend rows look inside one; everything else stores and
    moves it as it is. So the scales of a quantized format are bytes of the row, which is then of uint8.
    Raises ConfigError if a row is not a multiple of 8 bytes.
    """

    num_layers: int
    row_shape: tuple[int, ...]
    dtype: str  # a key of ELEMENT_BYTES

    def __post_init__(self) -> None:
        if self.row_bytes % _WORD_BYTES:
            raise ConfigError(
                f"KV of a token in a layer must be a multiple of {_WORD_BYTES} bytes, got {self.row_bytes}: "
                f"{list(self.row_shape)} of {self.dtype}"
            )

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a token in one layer."""
        return prod(self.row_shape) * ELEMENT_BYTES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes of a token in all layers."""
        return self.num_layers * self.row_bytes
