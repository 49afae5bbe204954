"""Captured decode steps whose input is the output of the previous step, all on the device.

A step changes only the contents of memory that was allocated once. So a captured step can be replayed for any
requests, on any group. The slots of a query lie in one list that is long enough for the whole lease; a step
writes to the first slot of an own row that has no KV yet, and attends all before it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import torch

from loong.core.instructions import RequestInput
from loong.core.placement import InstanceId
from loong.kernels.sampling.draw_params import DrawParams
from loong.model.transformer import Decoder
from loong.worker.backend import Backend, Reading
from loong.worker.kv.pool import KVPool
from loong.worker.sampling.grammar_constraints import Constraints
from loong.worker.sampling.lease_sampling import LeaseSampling
from loong.worker.steps.decode_state import BATCH_SIZES, GROUP_SIZES, LeaseBatch, LeaseTables
from loong.worker.steps.group_attention import GroupAttention
from loong.worker.steps.group_exchange import GroupExchange, KVExchange, NoExchange
from loong.worker.steps.served_leases import ServedLeases
from loong.worker.steps.step_inputs import PendingTokenIds
from loong.worker.steps.window_lists import lists_by_window, window_lists


class DecodeGraph:
    """Steps of requests, in a batch of the least size that has room for those of any master.

    Without `exchange`, only steps of this instance alone.
    """

    def __init__(
        self,
        instance_id: InstanceId,
        model: Decoder,
        pool: KVPool,
        backend: Backend,
        exchange: KVExchange | None,
        served: ServedLeases,
    ) -> None:
        """Take the parts of an instance; `served` are its steps for leases of others."""
        self._instance_id = instance_id
        self._model, self._pool, self._backend = model, pool, backend
        self._exchange: GroupExchange = exchange or NoExchange()
        self._has_groups, self.least_saved = exchange is not None, backend.least_saved
        device = backend.device.torch_device
        num_queries = max(BATCH_SIZES[-1], self._exchange.num_instances * GROUP_SIZES[-1])
        self.served, self.max_num_slots = served, served.max_num_slots
        self._tables = LeaseTables(pool, num_queries, self.max_num_slots, backend.device)
        self._windows = window_lists(pool, num_queries, self.max_num_slots, backend.device)
        self._largest = torch.zeros(BATCH_SIZES[-1], dtype=torch.float32, device=device)
        self._logits = torch.zeros(
            BATCH_SIZES[-1], model.shard.config.vocab_size, dtype=torch.float32, device=device
        )
        self._steps: dict[tuple[bool, int, bool], Callable[[], None]] = {}
        self._next_step: Callable[[], None]

    def capture(self) -> None:
        """Prepare a step for every batch size, the largest first, whose memory then serves the others."""
        self._exchange.begin({})
        kinds = (False,) if self._backend.least_saved is None else (False, True)
        for size, is_shared in product(reversed(BATCH_SIZES), kinds):
            step = partial(self._step, size, 0, NoExchange(), is_shared)
            self._steps[False, size, is_shared] = self._backend.capture(step)
            if self._has_groups and size in GROUP_SIZES:
                first_row = self._instance_id * size
                step = partial(self._step, size, first_row, self._exchange, is_shared)
                self._steps[True, size, is_shared] = self._backend.capture(step)
        self.served.capture()

    def begin(self, batch: LeaseBatch, pending_ids: PendingTokenIds | None) -> None:
        """Set the requests of the next steps; `pending_ids` are their tokens that are still to be sampled.

        The caller has waited for the previous lease.
        """
        num_queries = batch.size * (self._exchange.num_instances if batch.is_exchanged else 1)
        self._tables.begin(batch, num_queries, self._model.shard.config.vocab_size, pending_ids)
        for lists in self._windows.values():
            lists.begin(batch)
        if batch.is_exchanged:
            self._exchange.begin(batch.num_tokens, batch.holder_ids)
        self._next_step = self._steps[batch.is_exchanged, batch.size, batch.shared.is_reading]

    def lengthen(self, batch: LeaseBatch) -> None:
        """Set the slots of the next steps to those of `batch`, the same lease with more of them.

        A step that was launched after the last of these calls, or of `begin`, must have been read.
        """
        self._tables.lengthen(batch)
        for lists in self._windows.values():
            lists.lengthen(batch)

    def sampling(self, given: Sequence[RequestInput], constraints: Constraints) -> LeaseSampling:
        """Return the sampling of these requests, in the order of the rows that begin."""
        return LeaseSampling(given, constraints, self._model.shard.config.vocab_size, self._backend)

    def launch(self) -> None:
        """Launch the next step, without the extra sampling of `read`."""
        self._next_step()

    @torch.inference_mode()
    def read(self, sampling: LeaseSampling) -> Reading:
        """Sample the tokens of the step that was launched last, before the next one.

        The reading has its tokens and largest logits, [512] each, in row order, and the tensors of
        `sampling`.
        """
        state = self._tables.state
        extra = sampling.choose(self._logits, state.params, tokens=state.tokens, largest=self._largest)
        return self._backend.read(state.tokens, self._largest, *extra)

    def wait(self) -> None:
        """Return once all steps are done."""
        self._backend.device.wait()

    @torch.inference_mode()
    def _step(self, size: int, first_row: int, exchange: GroupExchange, is_shared: bool) -> None:
        state, slots, num_queries = self._tables.state, self._tables.slots, size * exchange.num_instances
        tokens, positions = state.tokens[:size], state.positions[:size]
        starts, num_keys = state.starts[:num_queries], state.num_keys[:num_queries]
        own = slice(first_row, first_row + size)
        has_slot = num_keys[own] < state.limits[:size]
        places = (starts[own] + num_keys[own]).clamp(max=len(slots) - 1)
        new_slots = slots[places].where(has_slot, -1)
        num_keys[own] += has_slot
        lists = lists_by_window(self._tables, self._windows, num_queries, own, has_slot)
        shared = self._tables.shared(num_queries) if is_shared else None
        attention = GroupAttention(self._pool, new_slots, lists, self._backend.device, exchange, shared)
        hidden = self._model.forward(tokens, positions, positions + 1, attention)
        logits = self._model.logits(hidden, out=self._logits[:size])
        positions += has_slot
        params = DrawParams(*(values[:size] for values in state.params))
        params.position.copy_(positions)
        self._backend.draw(logits, params, tokens=tokens, largest=self._largest[:size])
