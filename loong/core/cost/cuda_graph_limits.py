"""The limits of steps that workers replay from a captured graph, without launching kernels one by one.

Workers choose by it whether to replay a step, and the cost model predicts the step's time, both from the same
counts.
"""

from dataclasses import dataclass, replace

from loong.core.cost.work import InstanceWork

RING_ROOM = 4  # memory for the KV that an instance brings, over that for the queries of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaGraphLimits:
    """The limits of captured steps. A step is captured if each of its instances `has` its part within them.

    A step of prompts in which no KV travels has up to `most_rows` tokens, and attends up to `most_prompts`
    blocks of prompts on an instance. Attention in a graph takes any shape. For long prompts it is slower than
    attention that the host launches. A step is captured nevertheless in these cases:

    - From `least_copied` tokens on, up to `keys_a_row` keys a token: so few keys take little time.
    - A key meets fewer than `least_queries` queries on average.
    - Up to `most_pairs` pairs, or `most_lone_pairs` if each head has keys of its own, which are more to copy.
      Launching takes longer than the slower attention of so few pairs. `row_pairs` for each token stand for
      the rest of its computation.

    From `least_copied` tokens on, up to `most_copied` keys that meet more queries are copied out of the pool
    first. In a step in which only KV travels, an instance has up to `most_kv_rows` tokens, and brings the KV
    of up to `most_kv_room`. All bring up to `most_gathered`: this KV arrives before it is attended, while
    steps that the host launches hide most of the transfer.

    All keys that a step attends on an instance are listed. The lists have room for `lists_a_slot` times the
    KV of the whole group, since prompts may be shared.
    """

    most_rows: int
    most_prompts: int
    most_pairs: int
    most_lone_pairs: int
    most_kv_rows: int
    most_kv_room: int
    most_gathered: int
    least_copied: int
    most_copied: int
    keys_a_row: int
    least_queries: int
    row_pairs: int
    lists_a_slot: int

    def of_heads(self, num_heads: int, num_kv_heads: int) -> "CudaGraphLimits":
        """Return the limits for this number of heads."""
        return self if num_heads > num_kv_heads else replace(self, most_pairs=self.most_lone_pairs)

    def num_listed(self, num_slots: int) -> int:
        """Return the most keys that a step attends on an instance of a group with `num_slots` slots."""
        return max(self.lists_a_slot * num_slots, self.keys_a_row * self.most_rows)

    def num_copied(self, num_slots: int) -> int:
        """Return the most of these keys that are copied."""
        return min(self.most_copied, self.num_listed(num_slots))

    def has(self, work: InstanceWork) -> bool:
        """Return whether an instance's part of a step is within the limits."""
        if work.num_hops:
            return self._has_ring(work)
        if work.num_tokens > self.most_rows or work.num_prompt_blocks > self.most_prompts:
            return False
        return self.has_few_keys(work, work.num_tokens) or self.has_room(work)

    def has_few_keys(self, work: InstanceWork, num_rows: int) -> bool:
        """Return whether an instance attends few keys of prompts in a step of `num_rows` rows."""
        return num_rows >= self.least_copied and work.num_keys <= self.keys_a_row * num_rows

    def has_few_queries(self, work: InstanceWork) -> bool:
        """Return whether a key meets few queries, so that reading it is most of the work."""
        return work.num_pairs < self.least_queries * work.num_keys

    def has_room(self, work: InstanceWork) -> bool:
        """Return whether an instance may attend all keys of prompts in a graph without being slower."""
        num_pairs = work.num_pairs + self.row_pairs * work.num_tokens
        return self.has_few_queries(work) or num_pairs <= self.most_pairs

    def _has_ring(self, work: InstanceWork) -> bool:
        """Return whether a step with a ring is within the limits.

        Only the average number of rows from the other instances is known.
        """
        if work.num_decode_keys or work.num_sent_queries or work.num_ring_blocks < work.num_blocks:
            return False
        num_brought = max(work.num_keys - work.num_ring_keys, work.num_ring_keys / work.num_hops)
        has_room = num_brought <= self.most_kv_room and work.num_keys <= self.most_gathered
        return has_room and work.num_tokens <= self.most_kv_rows


NO_GRAPHS = CudaGraphLimits(**dict.fromkeys(CudaGraphLimits.__slots__, 0))
