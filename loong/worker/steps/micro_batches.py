"""A step that the host launches: whole, or in micro-batches whose products alternate with served attention.

While attention of one is served elsewhere, the next is computed up to its own (Lamina, 5.1.2).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from loong.attention.attention_step import AttentionStep, consecutive_slices
from loong.attention.elastic import ElasticAttention
from loong.attention.exchange import QueryExchange
from loong.attention.remote import QueryLayout, attended_by_queries, query_layout
from loong.fabric.protocol import OpenBatch
from loong.model.device import Device
from loong.model.transformer import Decoder
from loong.worker.steps.rotation import forward_rotating


def forward_in_turn(
    model: Decoder, columns: Sequence[Tensor], step: AttentionStep, batch: OpenBatch, device: Device
) -> Tensor:
    """Return hidden states [T, E] of a step, whose inputs are `columns` [T]; see `Decoder.forward`.

    All members of a group take micro-batches in one order, so that none waits for another in a circle.
    """
    if step.batch.rotates:
        return forward_rotating(model, columns, step, batch, device)
    if len(parts := step.micro_batches()) == 1:
        token_ids, positions, lengths = columns
        return model.forward(token_ids, positions, lengths, ElasticAttention(step, batch, device))
    rows = consecutive_slices(len(part.blocks) for part in parts)
    turns = [
        _Turn(model, [column[own] for column in columns], part, batch, device)
        for part, own in zip(parts, rows, strict=True)
    ]
    with torch.inference_mode():
        for layer in range(len(model.parameters.layers)):
            for turn in turns:
                turn.compute(layer)
        for turn in turns:
            turn.end()
    return torch.cat([turn.found for turn in turns])


class _Turn:
    """One micro-batch of decodes: `found` are its queries of a layer, and at last its hidden states."""

    def __init__(
        self, model: Decoder, columns: Sequence[Tensor], step: AttentionStep, batch: OpenBatch, device: Device
    ) -> None:
        self._device, self._store = device, step.store
        self._kinds: dict[int | None, tuple[QueryLayout, QueryExchange]] = {}  # by window of layers
        for window, its in step.by_window().items():
            layout = query_layout(its, device)
            self._kinds[window] = layout, QueryExchange(batch, device, layout.routing)
        self._sinks = [layer.sinks for layer in model.parameters.layers]
        token_ids, positions, lengths = columns
        self._slices = model.slices(token_ids, positions, lengths, self)
        self._served: Callable[[], Tensor] | None = None
        self.found: Tensor

    def new_kv(self, layer: int) -> tuple[Tensor, Tensor]:
        """See `transformer.Attention`."""
        layout, _ = self._kinds[self._store.layout.window(layer)]
        return self._store.layer(layer), layout.stored_slots

    def __call__(self, layer: int, q: Tensor, _sinks: Tensor | None = None) -> Tensor:
        """See `transformer.Attention`."""
        return self._attention(layer, q)()

    def compute(self, layer: int) -> None:
        """Take the attention of the layer before, compute up to that of `layer`, and begin it."""
        if self._served is None:
            self.found = next(self._slices)
        else:
            self.end()
        self._served = self._attention(layer, self.found)

    def end(self) -> None:
        """Take the attention of the last layer, and compute the rest."""
        assert self._served is not None, "`compute` comes first"
        self.found = self._slices.send(self._served())

    def _attention(self, layer: int, q: Tensor) -> Callable[[], Tensor]:
        """Begin attention of q, and return what ends it with the result."""
        (layout, exchange), sinks = self._kinds[self._store.layout.window(layer)], self._sinks[layer]
        pool = self._store.layer(layer)
        return attended_by_queries(layout, pool, exchange, q, sinks, self._device)
