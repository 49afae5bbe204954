"""The kernels of attention on a GPU that are not this project's own."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from loong.core.attention_kernels import AttentionKernels
from loong.core.errors import ConfigError
from loong.kernels import Partial
from loong.kernels.attention import cudnn_tile, flash_attention3
from loong.model.tiles import TileSizes


class AttendTile(Protocol):
    """Attention of a tile, by a library."""

    def __call__(
        self, q: Tensor, kv: Tensor, scale: float, *, is_causal: bool, num_pieces: int = 1
    ) -> Partial:
        """Return attention of q [T, H, D] over kv [S, 2, K, D], as partials [P, T, H, D] to be merged.

        P is at most `num_pieces`, equal parts of the keys that are computed at the same time.
        """


class TileKernel(NamedTuple):
    """A library's kernel for tiles, and the sizes from which on it is faster than this project's.

    `is_planned`: the library plans each shape, which takes long, so it is done at the start.
    """

    attend: AttendTile
    sizes: TileSizes
    is_planned: bool


def tile_kernel(chosen: AttentionKernels, dtype: torch.dtype, device: torch.device) -> TileKernel | None:
    """Return the kernel for tiles of keys and values of `dtype`, or None if this project's takes all.

    Raises `ConfigError` if FlashAttention-3 is asked for and cannot run.
    """
    if chosen is AttentionKernels.TRITON or dtype == torch.float32:
        return None
    if chosen in (AttentionKernels.AUTO, AttentionKernels.FA3):
        if flash_attention3.is_usable(dtype, device):
            sizes = TileSizes.usual()._replace(least_queries=512)  # its blocks are larger
            return TileKernel(flash_attention3.attend_tile, sizes, is_planned=False)
        if chosen is AttentionKernels.FA3:
            raise ConfigError("--attention-kernels fa3 needs the package, a Hopper GPU, and --dtype bfloat16")
    return TileKernel(cudnn_tile.attend_tile, TileSizes.usual(), is_planned=True)
