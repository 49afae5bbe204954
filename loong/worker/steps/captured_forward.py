"""The common part of captured forward passes: their memory, and a graph for each size."""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from loong.model.transformer import Attention, Decoder
from loong.worker.backend import Backend

Key = TypeVar("Key", bound=Hashable)


class Rows(Protocol):
    """The inputs of a step on the device: one value a row."""

    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    lengths: Tensor  # [T], of the KV that each row attends


class CapturedForward(Generic[Key]):
    """Forward passes from `rows` to hidden states, in memory that was allocated once.

    A step changes only the contents of that memory, so each size is captured once. Results of unused rows
    are ignored.
    """

    def __init__(self, model: Decoder, backend: Backend, rows: Rows, most_rows: int) -> None:
        self._model, self._backend, self._rows = model, backend, rows
        config, device = model.shard.config, backend.device.torch_device
        self._hidden = torch.zeros(most_rows, config.hidden_size, dtype=config.torch_dtype, device=device)
        self._graphs: dict[Key, Callable[[], None]] = {}

    def capture(self, key: Key, size: int, attention: Callable[[], Attention]) -> None:
        """Capture a step of `size` rows with the attention that is made for it."""
        self._graphs[key] = self._backend.capture(partial(self._step, size, attention))

    def replay(self, key: Key, num_rows: int) -> Tensor:
        """Launch a captured step. Return the hidden states [num_rows, E], valid until the next step."""
        self._graphs[key]()
        return self._hidden[:num_rows]

    @torch.inference_mode()
    def _step(self, size: int, attention: Callable[[], Attention]) -> None:
        rows = self._rows
        columns = (rows.token_ids[:size], rows.positions[:size], rows.lengths[:size])
        self._hidden[:size].copy_(self._model.forward(*columns, attention()))
