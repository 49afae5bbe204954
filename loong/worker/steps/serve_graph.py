"""Captured steps of a holder: attention for decode leases of groups in which this instance is no member.

The members' steps put queries into this instance's memory, and wait for its attention. So a step here has no
work of the host between layers, and no weights.
"""

from collections.abc import Callable
from functools import partial
from itertools import product

import torch

from loong.core.placement import InstanceId
from loong.fabric.lanes import Lane
from loong.model.tensor_parallel import Shard
from loong.worker.backend import Backend
from loong.worker.kv.pool import KVPool
from loong.worker.steps.decode_state import GROUP_SIZES, LeaseBatch, LeaseTables
from loong.worker.steps.group_attention import GroupAttention
from loong.worker.steps.group_exchange import GroupExchange
from loong.worker.steps.window_lists import lists_by_window, window_lists


class ServeGraph:
    """Steps of one lease at a time, in a lane with its `exchange`. See `DecodeGraph` for members."""

    def __init__(
        self,
        instance_id: InstanceId,
        shard: Shard,
        pool: KVPool,
        backend: Backend,
        lane: Lane,
        exchange: GroupExchange,
        max_num_slots: int,
    ) -> None:
        self._instance_id, self._shard, self._pool, self._backend = instance_id, shard, pool, backend
        self.lane, self._exchange = lane, exchange
        self.max_num_slots = max_num_slots
        num_queries = exchange.num_instances * GROUP_SIZES[-1]
        self._tables = LeaseTables(pool, num_queries, max_num_slots, backend.device)
        self._windows = window_lists(pool, num_queries, max_num_slots, backend.device)
        device = backend.device.torch_device
        self._no_queries = shard.zero_queries(GROUP_SIZES[-1], device)
        self._no_slots = torch.full(GROUP_SIZES[-1:], -1, dtype=torch.int64, device=device)
        self._steps: dict[tuple[int, bool], Callable[[], None]] = {}
        self._next_step: Callable[[], None]

    def capture(self) -> None:
        """Prepare a step for every size, the largest first, whose memory then serves the others."""
        self._exchange.begin({})
        kinds = (False,) if self._backend.least_saved is None else (False, True)
        for size, is_shared in product(reversed(GROUP_SIZES), kinds):
            self._steps[size, is_shared] = self._backend.capture(partial(self._step, size, is_shared))

    def use(self) -> None:
        """Make it usable in the calling thread, which calls it first."""
        self._backend.device.use()

    def begin(self, batch: LeaseBatch) -> None:
        """Set the lease of the next steps, which this instance serves."""
        num_queries = batch.size * self._exchange.num_instances
        self._tables.begin(batch, num_queries, self._shard.config.vocab_size)
        for lists in self._windows.values():
            lists.begin(batch)
        self._exchange.begin(batch.num_tokens, batch.holder_ids)
        self._next_step = self._steps[batch.size, batch.shared.is_reading]

    def launch(self) -> None:
        """Launch the next step, which waits for queries of each layer."""
        self._next_step()

    def wait(self) -> None:
        """Return once all steps are done."""
        self._backend.device.wait()

    @torch.inference_mode()
    def _step(self, size: int, is_shared: bool) -> None:
        num_queries = size * self._exchange.num_instances
        none = slice(0, 0)
        lists = lists_by_window(self._tables, self._windows, num_queries, none, self._no_slots[none])
        shared = self._tables.shared(num_queries) if is_shared else None
        slots, queries = self._no_slots[:size], self._no_queries[:size]
        attention = GroupAttention(self._pool, slots, lists, self._backend.device, self._exchange, shared)
        for layer in range(self._pool.num_layers):
            attention(layer, queries)
