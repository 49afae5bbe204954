"""A cost model with one coefficient a kind of work, added up over the busiest instance."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import assert_never

from loong.core.placement import InstanceId, Placement
from loong.core.plan import BatchPlan, QueryBlock, Transfer
from loong.core.request import RequestId


@dataclass(frozen=True, slots=True)
class LinearCostModel:
    """Seconds of each kind of work; the defaults are about those of a tiny model on CPU processes.

    A chunk of n new tokens on c cached ones, over d instances, is a(d) + b(d) n + c(d) n c + e(d) n^2.
    `pair_time` is for a query meeting a key, `read_time` for a key and value read at all: attention takes
    the larger. `transfer_time` is for a token's KV going from one instance to another, and a token's query
    takes `num_queries_per_kv / 2` times that (query heads to a KV head, against a key and a value).
    """

    step_overhead: float = 4e-3
    instance_overhead: float = 1e-3
    token_time: float = 20e-6
    pair_time: float = 10e-9
    read_time: float = 50e-9
    transfer_time: float = 1e-6
    transfer_overhead: float = 1e-3
    num_queries_per_kv: float = 4.0

    def prefill_time(self, num_new_tokens: int, num_cached_tokens: int, dop: int) -> float:
        """One chunk, striped over `dop` instances, its KV going round the ring."""
        num_stripe = num_new_tokens / dop
        num_received = (num_new_tokens + num_cached_tokens) * (dop - 1) / dop
        return (
            self._overhead(dop)
            + self.token_time * num_stripe
            + self._attend(num_stripe, num_cached_tokens)
            + self.pair_time * num_stripe * num_new_tokens / 2
            + self.transfer_time * num_received
        )

    def step_time(self, batch: BatchPlan, placements: Mapping[RequestId, Placement]) -> float:
        """One step of any batch: its overhead and the work of the busiest instance."""
        blocks: dict[RequestId, list[QueryBlock]] = {}
        for block in batch.queries:
            blocks.setdefault(block.request_id, []).append(block)
        seconds = dict.fromkeys(batch.group.instance_ids, 0.0)
        for request_id, chunk in blocks.items():
            self._add_chunk(seconds, chunk, placements[request_id].tokens_by_instance())
        return self._overhead(batch.group.dop) + max(seconds.values())

    def migration_time(self, num_tokens: int) -> float:
        """One message and the KV of `num_tokens` tokens."""
        return self.transfer_overhead + self.transfer_time * num_tokens

    def _overhead(self, dop: int) -> float:
        return self.step_overhead + self.instance_overhead * (dop - 1)

    def _attend(self, num_queries: float, num_keys: float) -> float:
        return max(self.pair_time * num_queries, self.read_time) * num_keys

    def _add_chunk(
        self, seconds: dict[InstanceId, float], chunk: list[QueryBlock], cached: Counter[InstanceId]
    ) -> None:
        """Add what one request costs each instance; in its chunk, a query meets half the keys on average."""
        num_new = sum(len(block.positions) for block in chunk)
        num_cached = cached.total()
        holders = cached.keys() | {block.master_id for block in chunk}
        for block in chunk:
            num_queries, master_id = len(block.positions), block.master_id
            seconds[master_id] += num_queries * (self.token_time + self.pair_time * num_new / 2)
            match block.transfer:
                case Transfer.KV:
                    num_received = num_new + num_cached - num_queries - cached[master_id]
                    seconds[master_id] += self._attend(num_queries, num_cached)
                    seconds[master_id] += self.transfer_time * num_received
                case Transfer.QUERY:
                    num_sent = num_queries * (len(holders) - 1)
                    seconds[master_id] += self.transfer_time * self.num_queries_per_kv / 2 * num_sent
                    for instance_id, num_keys in cached.items():
                        seconds[instance_id] += self._attend(num_queries, num_keys)
                case _:
                    assert_never(block.transfer)
