"""Measures on the present GPU which tiles of attention a library computes faster than Triton."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from triton.testing import do_bench

from loong.core.attention_kernels import AttentionKernels
from loong.kernels import Partial, gpu
from loong.kernels.attend_task import AttendTask
from loong.model.attention_kernels import TileKernel, tile_kernel
from loong.model.config import ModelConfig
from loong.model.cuda_attention import num_pieces_on
from loong.model.tensor_parallel import Shard
from loong.model.tiles import TileSizes

SQUARES = (4096, 8192, 16384)
QUERIES = (256, 512, 1024, 2048)
KEYS = (1024, 2048, 4096)
_LONG = 8192  # one side of a rectangle, while the other is searched
_NUM_PROMPTS = 4  # which Triton's kernel attends at once, so that no multiprocessor is idle

Call = Callable[[], object]


class TileMeasurer:
    """Measures both kernels on tensors like those of a model's shard on one GPU."""

    def __init__(self, config: ModelConfig, tp_size: int, device: torch.device, kernel: TileKernel) -> None:
        self._attend, self._usual = kernel.attend, kernel.sizes
        shard = Shard(config, 0, tp_size)
        self._query_shape, self._row_shape = (shard.num_heads, config.head_dim), shard.kv_layout.row_shape
        self._dtype, self._device = config.torch_dtype, device

    def sizes(self) -> TileSizes:
        """Return the usual sizes, with the measured least ones from which on the library is faster."""
        return self._usual._replace(
            square=self._least(SQUARES, self.square),
            least_queries=self._least(QUERIES, lambda size: self.rectangle(size, _LONG)),
            keys=self._least(KEYS, lambda size: self.rectangle(_LONG // 2, size)),
        )

    def square(self, size: int) -> tuple[float, float]:
        """Return the seconds of a causal square, by Triton on several at once and by the library."""
        q, kv = self._random_queries(_NUM_PROMPTS * size), self._random_rows(_NUM_PROMPTS * size)
        starts = range(0, _NUM_PROMPTS * size, size)
        tasks = self._table([AttendTask.causal(start, range(size), start, range(size)) for start in starts])
        total = Partial(torch.empty_like(q), self._unseen(len(q)))
        out = total.out[:size]
        return (
            _seconds(lambda: gpu.attend_blocks(q, kv, tasks, scale=1.0, total=total)) / _NUM_PROMPTS,
            _seconds(lambda: out.copy_(self._attend(q[:size], kv[:size], 1.0, is_causal=True).out[0])),
        )

    def rectangle(self, num_queries: int, num_keys: int) -> tuple[float, float]:
        """Return the seconds of a chunk's attention to its history, by Triton and by the library."""
        q, kv = self._random_queries(num_queries), self._random_rows(num_keys)
        tasks = self._table([AttendTask.full(0, num_queries, 0, num_keys)])
        total = Partial(torch.zeros_like(q, dtype=torch.float32), self._unseen(num_queries))
        by_library = partial(self._attend, q, kv, 1.0, is_causal=False, num_pieces=num_pieces_on(q, num_keys))
        return (
            _seconds(lambda: gpu.attend_blocks(q, kv, tasks, scale=1.0, total=total)),
            _seconds(lambda: gpu.merge_into(total, by_library())),
        )

    @staticmethod
    def _least(sizes: Sequence[int], measure: Callable[[int], tuple[float, float]]) -> int:
        """Return the first of growing sizes from which on the library is faster, or the last."""
        least = sizes[-1]
        for size in reversed(sizes):
            by_triton, by_library = measure(size)
            if by_library >= by_triton:
                break
            least = size
        return least

    def _random_queries(self, num_tokens: int) -> Tensor:
        return torch.randn(num_tokens, *self._query_shape, dtype=self._dtype, device=self._device)

    def _random_rows(self, num_tokens: int) -> Tensor:
        return torch.randn(num_tokens, *self._row_shape, dtype=self._dtype, device=self._device)

    def _unseen(self, num_queries: int) -> Tensor:
        return torch.full((num_queries, self._query_shape[0]), -torch.inf, device=self._device)

    def _table(self, tasks: Sequence[AttendTask]) -> Tensor:
        return torch.tensor(tasks, dtype=torch.int64, device=self._device)


def measured_tile_sizes(
    config: ModelConfig, tp_size: int, index: int, kernels: AttentionKernels = AttentionKernels.AUTO
) -> TileSizes | None:
    """Return the best sizes for a model on GPU `index`, which must be idle.

    Returns None if the library that `kernels` choose has no tiles of the model's dtype.
    """
    device = torch.device("cuda", index)
    kernel = tile_kernel(kernels, config.torch_dtype, device)
    if kernel is None:
        return None
    torch.cuda.set_device(index)
    sizes = TileMeasurer(config, tp_size, device, kernel).sizes()
    torch.cuda.empty_cache()
    return sizes


def _seconds(call: Call) -> float:
    milliseconds: float = do_bench(call, warmup=10, rep=40, return_mode="median")
    return milliseconds * 1e-3
