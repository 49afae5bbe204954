"""The memory of keys and values, as all but a model and its kernels know it."""

from dataclasses import dataclass
from math import prod

from loong.core.errors import ConfigError

ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1}
KV_CACHE_DTYPES = ("auto", "fp8")  # values of --kv-cache-dtype; auto: the model's
SCALE_BYTES = 4  # of a head's keys or values in FP8
_WORD_BYTES = 8  # a pool copies rows by words


def row_of_heads(num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
    """Return the shape of a row with the keys of all heads, followed by their values."""
    return 2, num_kv_heads, head_dim


def row_of_fp8_heads(num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
    """Return the shape of such a row in FP8, as bytes: the values, then a scale for each head's keys and each
    head's values.
    """
    return (2 * num_kv_heads * (head_dim + SCALE_BYTES),)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The keys and values of a token on one rank: in each layer a row of `row_shape`, without gaps.

    A model makes it. Only the kernels that write and attend rows look inside one; everything else stores and
    moves it as it is. So the scales of a quantized format are bytes of the row, which is then of uint8.
    Raises ConfigError if a row is not a multiple of 8 bytes.

    Queries of a layer with a window of W see the last W positions, their own among them. `layer_windows` has
    the window of each layer, None for all positions; it is empty if no layer has one.
    """

    num_layers: int
    row_shape: tuple[int, ...]
    dtype: str  # a key of ELEMENT_BYTES
    layer_windows: tuple[int | None, ...] = ()

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

    def window(self, layer: int) -> int | None:
        """Return the window of a layer, or None if its queries see all positions before them."""
        return self.layer_windows[layer] if self.layer_windows else None

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Return the window of each kind of layers, None first."""
        return tuple(sorted(set(self.layer_windows), key=lambda window: window or 0)) or (None,)

    @property
    def largest_window(self) -> int:
        """Return the largest window, or 0 if no layer has one."""
        return max((window for window in self.windows if window is not None), default=0)

    @property
    def num_window_layers(self) -> int:
        """Return the number of layers with a window."""
        return sum(window is not None for window in self.layer_windows)

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes of a token in all layers."""
        return self.num_layers * self.row_bytes

    @property
    def window_bytes_per_token(self) -> int:
        """Return the bytes of a token in the layers with a window."""
        return self.num_window_layers * self.row_bytes


@dataclass(frozen=True, slots=True)
class LentSlots:
    """Slots of a pool of another process, which keeps them free: runs of adjoining ones, as [first, end).

    The pool has `num_slots` in all, and `path` maps its memory as long as that process lives.
    """

    path: str
    num_slots: int
    runs: tuple[tuple[int, int], ...]
