"""Captured decode steps whose input is the output of the previous step, all on the device.

A step changes only the contents of memory that was allocated once. So a captured step can be replayed for any
requests, on any group. The slots of a query lie in one list that is long enough for the whole lease; a step
writes to the first slot of an own row that has no KV yet, and attends all before it.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from loong.core.instructions import RequestInput
from loong.core.placement import InstanceId
from loong.kernels import Partial
from loong.kernels.sampling.draw_params import DrawParams
from loong.kernels.slots import SlotLists
from loong.model.device import Device
from loong.model.transformer import Decoder
from loong.worker.backend import Backend, Reading
from loong.worker.kv.pool import KVPool
from loong.worker.sampling.grammar_constraints import Constraints
from loong.worker.sampling.lease_sampling import LeaseSampling
from loong.worker.steps.decode_state import BATCH_SIZES, GROUP_SIZES, DecodeState, LeaseBatch
from loong.worker.steps.group_exchange import GroupExchange, NoExchange
from loong.worker.steps.step_inputs import PendingTokenIds

_LISTS_A_SLOT = 4.0  # the length of a lease's lists on average, where prompts are shared


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
        exchange: GroupExchange | None,
    ) -> None:
        self._instance_id = instance_id
        self._model, self._pool, self._backend = model, pool, backend
        self._exchange: GroupExchange = exchange or NoExchange()
        self._has_groups = exchange is not None
        device = backend.device.torch_device
        num_queries = max(BATCH_SIZES[-1], self._exchange.num_instances * GROUP_SIZES[-1])
        num_words = DecodeState.num_words(num_queries)
        self.max_num_slots = num_slots = int(_LISTS_A_SLOT * (pool.num_free + pool.num_used))  # of a lease
        self._state = DecodeState(num_queries, torch.zeros(num_words, dtype=torch.int64, device=device))
        self._slots = torch.zeros(num_slots, dtype=torch.int64, device=device)
        host_words = backend.device.host_words  # allocated once: allocation takes milliseconds
        self._host, self._host_slots = DecodeState(num_queries, host_words(num_words)), host_words(num_slots)
        self._cu_seqlens = torch.zeros(num_queries + 1, dtype=torch.int32, device=device)
        self._largest = torch.zeros(BATCH_SIZES[-1], dtype=torch.float32, device=device)
        self._logits = torch.zeros(
            BATCH_SIZES[-1], model.shard.config.vocab_size, dtype=torch.float32, device=device
        )
        self._steps: dict[tuple[bool, int], Callable[[], None]] = {}
        self._next_step: Callable[[], None]

    def max_size(self, dop: int) -> int:
        """Return the most tokens that a master can have in a group of `dop` instances."""
        if dop == 1:
            return BATCH_SIZES[-1]
        return GROUP_SIZES[-1] if self._has_groups else 0

    def capture(self) -> None:
        """Prepare a step for every batch size, the largest first, whose memory then serves the others."""
        self._exchange.begin({})
        for size in reversed(BATCH_SIZES):
            self._steps[False, size] = self._backend.capture(partial(self._step, size, 0, NoExchange()))
            if self._has_groups and size in GROUP_SIZES:
                first_row = self._instance_id * size
                step = partial(self._step, size, first_row, self._exchange)
                self._steps[True, size] = self._backend.capture(step)

    def begin(self, batch: LeaseBatch, pending_ids: PendingTokenIds | None) -> None:
        """Set the requests of the next steps; `pending_ids` are their tokens that are still to be sampled.

        The caller has waited for the previous lease.
        """
        is_group = bool(batch.peer_rows)
        first_row = self._instance_id * batch.size if is_group else 0
        vocab_size = self._model.shard.config.vocab_size
        num_slots = self._host.fill(batch, first_row, vocab_size)
        self._state.memory.copy_(self._host.memory, non_blocking=True)
        if pending_ids is not None:
            pending_ids.fill(self._state.tokens)
        self._copy_slots(batch, num_slots)
        if is_group:
            self._exchange.begin(batch.num_tokens)
        self._next_step = self._steps[is_group, batch.size]

    def lengthen(self, batch: LeaseBatch) -> None:
        """Set the slots of the next steps to those of `batch`, the same lease with more of them.

        A step that was launched after the last of these calls, or of `begin`, must have been read.
        """
        first_row = self._instance_id * batch.size if batch.peer_rows else 0
        num_slots = self._host.list_slots(batch, first_row)
        self._state.limits.copy_(self._host.limits, non_blocking=True)
        self._state.starts.copy_(self._host.starts, non_blocking=True)
        self._copy_slots(batch, num_slots)

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
        state = self._state
        extra = sampling.choose(self._logits, state.params, tokens=state.tokens, largest=self._largest)
        return self._backend.read(state.tokens, self._largest, *extra)

    def wait(self) -> None:
        """Return once all steps are done."""
        self._backend.device.wait()

    def _copy_slots(self, batch: LeaseBatch, num_slots: int) -> None:
        self._pool.list_slots(batch.listed, self._host_slots)
        self._slots[:num_slots].copy_(self._host_slots[:num_slots], non_blocking=True)

    @torch.inference_mode()
    def _step(self, size: int, first_row: int, exchange: GroupExchange) -> None:
        state, num_queries = self._state, size * exchange.num_instances
        tokens, positions = state.tokens[:size], state.positions[:size]
        starts, num_keys = state.starts[:num_queries], state.num_keys[:num_queries]
        own = slice(first_row, first_row + size)
        has_slot = num_keys[own] < state.limits[:size]
        places = (starts[own] + num_keys[own]).clamp(max=len(self._slots) - 1)
        new_slots = self._slots[places].where(has_slot, -1)
        num_keys[own] += has_slot
        cu_seqlens = self._cu_seqlens[: num_queries + 1]
        cu_seqlens[1:].copy_(num_keys.cumsum(0))
        lists = SlotLists(self._slots, starts, cu_seqlens)
        attention = _GroupAttention(self._pool, new_slots, lists, self._backend.device, exchange)
        hidden = self._model.forward(tokens, positions, positions + 1, attention)
        logits = self._model.logits(hidden, out=self._logits[:size])
        positions += has_slot
        params = DrawParams(*(values[:size] for values in state.params))
        params.position.copy_(positions)
        self._backend.draw(logits, params, tokens=tokens, largest=self._largest[:size])


class _GroupAttention:
    """Attention of one query a request over its slots on all members; see `transformer.Attention`."""

    def __init__(
        self, pool: KVPool, new_slots: Tensor, lists: SlotLists, device: Device, exchange: GroupExchange
    ) -> None:
        self._pool, self._new_slots, self._lists = pool, new_slots, lists
        self._device, self._exchange = device, exchange

    def new_kv(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._pool.layer(layer), self._new_slots

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        """Attend the queries of all masters at once, after one exchange."""
        queries = self._exchange.gather(layer, q)
        lse = torch.empty(queries.shape[:2], dtype=torch.float32, device=q.device)
        part = Partial(torch.empty_like(queries), lse)
        pool = self._pool.layer(layer)
        self._device.attend_slots(queries, pool, self._lists, scale=q.shape[-1] ** -0.5, out=part)
        return self._exchange.merge(layer, part)
