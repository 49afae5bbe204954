"""A step whose micro-batches go from member to member of a group, layer by layer (Lamina, 5.1.1).

Each member takes its slices in the order in which they begin. Between them it answers for the slices that
others have begun: as many as there are other members. So none waits for another in a circle.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loong.attention.attention_step import AttentionStep
from loong.attention.remote import attended_by_queries, query_attention
from loong.attention.rotated import Slice, new_slots, rotated_exchanges, rows_of_masters, slices_of
from loong.core.placement import InstanceId
from loong.fabric.protocol import OpenBatch, Pending
from loong.fabric.traffic import Channel
from loong.kernels import Partial
from loong.model.device import Device
from loong.model.transformer import Decoder


def forward_rotating(
    model: Decoder, columns: Sequence[Tensor], step: AttentionStep, batch: OpenBatch, device: Device
) -> Tensor:
    """Return hidden states [T, E] of the rows of this member's requests.

    `columns` [T] are their inputs; see `Decoder.forward`.
    """
    with torch.inference_mode():
        return _Rotation(model, columns, step, batch, device).run()


@dataclass(slots=True)
class _Begun:
    """Attention that another slice waits for: `end` returns it, and `hidden` [n, E] goes on with it."""

    hidden: Tensor
    end: Callable[[], Tensor]


class _Rotation:
    """The part of one member."""

    def __init__(
        self, model: Decoder, columns: Sequence[Tensor], step: AttentionStep, batch: OpenBatch, device: Device
    ) -> None:
        self._model, self._batch, self._device, self._store = model, batch, device, step.store
        self._own_id, self._group = step.instance_id, step.batch.group.instance_ids
        parts = step.micro_batches()
        self._exchanges = [rotated_exchanges(part, batch, device) for part in parts]
        self._rows = [
            {i: device.upload(torch.tensor(rows)) for i, rows in rows_of_masters(part).items()}
            for part in parts
        ]
        self._slots = [
            {window: device.upload(new_slots(its)) for window, its in part.by_window().items()}
            for part in parts
        ]
        self._no_queries = model.shard.zero_queries(0, device.torch_device)
        self._columns = self._gathered(torch.stack(tuple(columns)), step)
        self._angles = [model.rotary(positions, lengths) for _, positions, lengths in self._columns]
        self._begun: dict[int, _Begun] = {}  # by part
        self._sent: list[Pending] = []
        self._found: dict[int, Tensor] = {}  # hidden states of own rows, by part
        self._slices = list(slices_of(len(model.parameters.layers), len(self._group)))

    def run(self) -> Tensor:
        """Take all slices, and return the hidden states."""
        dop, place = len(self._group), self._group.index(self._own_id)
        for turn in range(len(self._slices) + dop):
            if turn % dop == place:
                self._take(turn, self._compute)
            if (turn + 1) % dop != place:
                self._take(turn + 1 - dop, self._serve)
            if turn % dop == place:
                self._take(turn - dop, self._end)
        for turn in range(len(self._slices) - dop - 1, len(self._slices)):
            self._take(turn, self._take_result)
        for sent in self._sent:
            sent.wait()
        return torch.cat([self._found[part] for part in sorted(self._found)] or [self._hidden(0)])

    def _take(self, turn: int, action: Callable[[Slice], None]) -> None:
        """Do something for the slice of this turn, if there is one: micro-batches may be few."""
        if 0 <= turn < len(self._slices) and self._slices[turn].part < len(self._rows):
            action(self._slices[turn])

    def _compute(self, one: Slice) -> None:
        """Compute a slice: up to attention, which begins, or up to hidden states, which go to masters."""
        model, products, layers = self._model, self._model.products, self._model.parameters.layers
        hidden, attended = self._received(one)
        normed, added = torch.empty_like(hidden), None
        if attended is not None:
            before = layers[one.index - 1]
            added = products.mlp(before, hidden, products.output(before, attended), normed)
        if one.index == len(layers):
            products.normed(hidden, added, model.parameters.norm, normed)
            for master_id, rows in self._rows[one.part].items():
                self._pass(master_id, normed[rows], Channel.CONTROL, one.part)
            return
        products.normed(hidden, added, layers[one.index].attention_norm, normed)
        pool = self._store.layer(one.index)
        new = pool.new_empty(len(hidden), *pool.shape[1:])
        places = torch.arange(len(hidden), device=hidden.device)
        q = products.queries(layers[one.index], normed, self._angles[one.part][one.index], new, places)
        for master_id, rows in self._rows[one.part].items():
            if master_id == self._own_id:
                self._keep(one, new[rows])
            else:
                self._send(master_id, new[rows], Channel.QUERIES)
        self._begun[one.part] = _Begun(hidden, self._attention(one, q))

    def _serve(self, one: Slice) -> None:
        """Store the new KV of own requests, and attend for the member that computes a slice."""
        if one.index == len(self._model.parameters.layers):
            return
        pool, rows = self._store.layer(one.index), self._rows[one.part].get(self._own_id)
        if rows is not None:
            new = pool.new_empty(len(rows), *pool.shape[1:])
            self._batch.exchange({}, {self._group[one.member]: new}, Channel.QUERIES).wait()
            self._keep(one, new)
        layout, exchange = self._exchanges[one.part][self._key(one)]
        total = Partial.unseen(self._no_queries, is_merged=True)
        query_attention(layout, pool, exchange, self._no_queries, total, self._device)()

    def _end(self, one: Slice) -> None:
        """Send the attention of a slice to the member that goes on with its micro-batch."""
        if one.index < len(self._model.parameters.layers):
            begun = self._begun.pop(one.part)
            message = torch.cat((begun.hidden, begun.end().flatten(1)), dim=1)
            self._send(self._group[(one.member + 1) % len(self._group)], message, Channel.RING)

    def _received(self, one: Slice) -> tuple[Tensor, Tensor | None]:
        """Return the residual stream of a micro-batch, and the attention of the layer before, if any."""
        if one.index == 0:
            return self._model.parameters.embedding.rows(self._columns[one.part][0]), None
        hidden = self._hidden(len(self._columns[one.part][0]))
        heads = self._no_queries.shape[1:]
        message = hidden.new_empty(len(hidden), hidden.shape[1] + heads.numel())
        before = self._group[(one.member - 1) % len(self._group)]
        self._batch.exchange({}, {before: message}, Channel.RING).wait()
        hidden.copy_(message[:, : hidden.shape[1]])
        return hidden, message[:, hidden.shape[1] :].reshape(-1, *heads)

    def _attention(self, one: Slice, q: Tensor) -> Callable[[], Tensor]:
        """Begin attention of q, and return what ends it with the result."""
        layout, exchange = self._exchanges[one.part][self._key(one)]
        sinks = self._model.parameters.layers[one.index].sinks
        pool = self._store.layer(one.index)
        return attended_by_queries(layout, pool, exchange, q, sinks, self._device)

    def _key(self, one: Slice) -> tuple[InstanceId, int | None]:
        return self._group[one.member], self._store.layout.window(one.index)

    def _keep(self, one: Slice, new: Tensor) -> None:
        pool = self._store.layer(one.index)
        slots = self._slots[one.part][self._store.layout.window(one.index)]
        self._device.copy_rows(new, pool, source_rows=None, target_rows=slots)

    def _pass(self, master_id: InstanceId, rows: Tensor, channel: Channel, part: int) -> None:
        if master_id == self._own_id:
            self._found[part] = rows
        else:
            self._send(master_id, rows, channel)

    def _send(self, instance_id: InstanceId, tensor: Tensor, channel: Channel) -> None:
        self._sent.append(self._batch.exchange({instance_id: tensor.contiguous()}, {}, channel))

    def _take_result(self, one: Slice) -> None:
        """Receive hidden states of own rows of a micro-batch, if another member computed its last slice."""
        rows = self._rows[one.part].get(self._own_id)
        if rows is not None and self._group[one.member] != self._own_id:
            self._found[one.part] = self._hidden(len(rows))
            incoming = {self._group[one.member]: self._found[one.part]}
            self._batch.exchange({}, incoming, Channel.CONTROL).wait()

    def _hidden(self, num_rows: int) -> Tensor:
        size = self._model.shard.config.hidden_size
        return self._no_queries.new_empty(num_rows, size)

    def _gathered(self, own: Tensor, step: AttentionStep) -> list[Tensor]:
        """Return the inputs [3, n] of each micro-batch's rows, of all masters, given the own [3, T]."""
        counts = dict.fromkeys(self._group, 0)
        for block in step.batch.queries:
            counts[block.master_id] += 1
        others = [i for i in self._group if i != self._own_id]
        of = {i: own.new_empty(3, counts[i]) for i in others}
        self._batch.exchange(dict.fromkeys(others, own), of, Channel.RING).wait()
        of[self._own_id] = own
        taken = dict.fromkeys(self._group, 0)
        found = []
        for rows in self._rows:
            columns = own.new_empty(3, sum(map(len, rows.values())))
            for master_id, places in rows.items():
                first = taken[master_id]
                columns[:, places] = of[master_id][:, first : first + len(places)]
                taken[master_id] += len(places)
            found.append(columns)
        return found
