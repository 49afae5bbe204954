"""Query exchange by puts of the device itself: three launches a layer."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loong.attention.exchange import QueryExchange, QueryRouting, StepExchange
from loong.fabric.memory.arena import Arena, Clock
from loong.kernels import Partial
from loong.kernels.exchange.mailbox import Mailbox, Peers, await_members
from loong.kernels.exchange.row_exchange import RowExchange, RowPeers
from loong.model.device import Device
from loong.model.tensor_parallel import Shard

MOST_ROWS = 4096  # sent from one instance to another in a step by puts
_MAX_CHUNKS = 64  # programs that put to one peer; enough to fill a link with rows of any size
_ALIGNED = 2  # numbers; an address of another alignment would compile the kernels again

Numbers: TypeAlias = NDArray[np.int64]  # on the host, where NumPy is much faster than torch
_NO_ROWS: Numbers = np.empty(0, dtype=np.int64)


class PutExchange:
    """Implements QueryExchange over an arena, for steps of at most `most_rows` rows from one instance to
    another.

    Larger steps go to `others`. A clock of this exchange counts epochs; each step advances it by the number
    of layers.
    """

    def __init__(
        self, arena: Arena, shard: Shard, device: Device, others: QueryExchange, most_rows: int = MOST_ROWS
    ) -> None:
        self._arena, self._device, self._others, self._most_rows = arena, device, others, most_rows
        self._num_layers, self._num_instances = shard.config.num_layers, arena.world.num_instances
        self._instance, tp_rank = arena.world.place(arena.rank)
        self._deadline = arena.deadline()
        shape = (self._num_instances, most_rows, shard.num_heads, shard.config.head_dim)
        self._mailbox = Mailbox.laid(
            arena.memory, arena.reserve, shape, shard.config.torch_dtype, max_num_chunks=_MAX_CHUNKS
        )
        self._ranks = [arena.world.rank(i, tp_rank) for i in range(self._num_instances)]
        self._device_ranks = torch.tensor(self._ranks, device=device.torch_device)
        self._nobodys_tokens = torch.zeros_like(self._device_ranks)
        self._clock = arena.clocks[Clock.QUERIES : Clock.QUERIES + 1]
        self._opened = arena.opened[tp_rank :: arena.world.tp_size]

    def begin(self, routing: QueryRouting) -> StepExchange:
        """See QueryExchange. The device waits until all peers of this step have opened the batch."""
        self._clock.add_(self._num_layers)
        if routing.is_empty or routing.has_holders or routing.most_rows > self._most_rows:
            return self._others.begin(routing)
        return self._opened_step(routing)

    def warm_up(self) -> None:
        """Compile the three kernels that each layer uses."""
        heads, dtype = self._mailbox.queries.shape[2:], self._mailbox.queries.dtype
        step = self._opened_step(QueryRouting({}, {}, 0))
        for part_dtype in {dtype, torch.float32}:
            q = self._mailbox.queries.new_empty(0, *heads)
            lse = q.new_empty(0, heads[0], dtype=torch.float32)
            step.send_queries(q)
            step.peer_queries()
            step.send_partials(Partial(q.to(part_dtype), lse), Partial(q.float(), lse))

    def _opened_step(self, routing: QueryRouting) -> StepExchange:
        peers = self._peers(routing)
        members = Peers(peers.addresses, self._nobodys_tokens, peers.ranks, peers.epoch)
        await_members(self._opened, members, self._deadline)
        num_peer_rows = routing.num_peer_rows or {0: 0}
        came = [self._mailbox.queries[peer_id, :n] for peer_id, n in num_peer_rows.items()]
        return _Puts(RowExchange(self._mailbox, peers, self._deadline, self._instance), came)

    def _peers(self, routing: QueryRouting) -> RowPeers:
        """Return the tables of a step."""
        ids = range(self._num_instances)
        sent_rows = [routing.sent_rows[i].numpy() if i in routing.sent_rows else _NO_ROWS for i in ids]
        num_sent_rows, num_peer_rows = (
            [len(rows) for rows in sent_rows],
            [routing.num_peer_rows.get(i, 0) for i in ids],
        )
        is_peer = [bool(num_sent_rows[i] or num_peer_rows[i]) for i in ids]
        addresses = [self._arena.host_addresses[self._ranks[i]] if is_peer[i] else 0 for i in ids]
        all_sent_rows = np.concatenate(sent_rows)
        merged_rows = np.unique(all_sent_rows)
        places = np.full((len(merged_rows), len(ids)), -1)
        for i, its_rows in enumerate(sent_rows):
            places[np.searchsorted(merged_rows, its_rows), i] = np.arange(len(its_rows))
        counts = (addresses, num_sent_rows, num_peer_rows, _starts(num_sent_rows), _starts(num_peer_rows))
        tables = (*map(np.array, counts), all_sent_rows, merged_rows, places.ravel())
        to, sent, due, sent_from, due_from, rows, merged, flat_places = self._upload(tables)
        return RowPeers(
            addresses=to,
            ranks=self._device_ranks,
            num_sent_rows=sent,
            num_peer_rows=due,
            sent_from=sent_from,
            served_from=due_from,
            rows=rows,
            merged_rows=merged,
            places=flat_places.view(places.shape),
            epoch=self._clock,
        )

    def _upload(self, tables: Sequence[Numbers]) -> Iterator[Tensor]:
        """Upload the tables [n] to the device in one copy."""
        starts = _starts([-(-len(table) // _ALIGNED) * _ALIGNED for table in tables])
        together = np.zeros(starts[-1] + len(tables[-1]), dtype=np.int64)
        for start, table in zip(starts, tables, strict=True):
            together[start : start + len(table)] = table
        uploaded = self._device.upload(torch.from_numpy(together))
        return (uploaded[start : start + len(table)] for start, table in zip(starts, tables, strict=True))


class _Puts:
    """Implements StepExchange."""

    def __init__(self, exchange: RowExchange, came: list[Tensor]) -> None:
        self._exchange, self._peer_queries = exchange, came
        self._layer = -1

    def send_queries(self, q: Tensor) -> None:
        """See StepExchange."""
        self._layer += 1
        self._exchange.put(q, self._layer)

    def peer_queries(self) -> Tensor:
        """See StepExchange."""
        self._exchange.wait(self._layer)
        return self._peer_queries[0] if len(self._peer_queries) == 1 else torch.cat(self._peer_queries)

    def send_partials(self, part: Partial, total: Partial) -> None:
        """See StepExchange."""
        self._exchange.send_partials(part, total, self._layer)


def num_exchange_bytes(num_instances: int, shard: Shard, most_rows: int = MOST_ROWS) -> int:
    """Return the most bytes of an arena that a PutExchange among `num_instances` instances takes."""
    row = shard.num_heads * (2 * shard.config.head_dim * shard.config.torch_dtype.itemsize + 4)
    return num_instances * (most_rows * row + (1 << 16))


def _starts(counts: Sequence[int]) -> list[int]:
    """Return the start of each piece when the pieces follow each other."""
    return [0, *accumulate(counts)][:-1]
