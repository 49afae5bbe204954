"""Which steps workers replay from a captured graph, so that no kernel is launched one by one.

Workers decide by it what to replay, and the cost model what a step takes, both from the same counts.
"""

from dataclasses import dataclass, replace

from loong.core.cost.work import InstanceWork


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaGraphLimits:
    """The limits of what is captured; a step is if each of its instances `has` its part within them.

    A step of prompts in which no KV travels has up to `most_rows` tokens and meets up to `most_prompts`
    blocks of prompts on an instance. Attention in a graph takes any shape, and is slower than what a host may
    launch for long prompts. That does not matter where keys are few: from `least_copied` tokens on, up to
    `keys_a_row` a token. It is not slower where a key meets fewer than `least_queries` on average. And
    launching takes so long that up to `most_pairs` are captured, or `most_lone_pairs` if each head has keys
    of its own, which are more to copy; of these `row_pairs` for each token stand for all else that is
    computed of it. From `least_copied` tokens on, up to `most_copied` keys that meet more queries are copied
    out of the pool first.

    In a step in which only KV travels, up to `most_kv_rows` come from each instance.

    All keys that a step attends on an instance are listed, and there is room for `lists_a_slot` times the KV
    of the whole group: prompts may be shared.
    """

    most_rows: int
    most_prompts: int
    most_pairs: int
    most_lone_pairs: int
    most_kv_rows: int
    least_copied: int
    most_copied: int
    keys_a_row: int
    least_queries: int
    row_pairs: int
    lists_a_slot: int

    def of_heads(self, num_heads: int, num_kv_heads: int) -> "CudaGraphLimits":
        """The limits for so many heads."""
        return self if num_heads > num_kv_heads else replace(self, most_pairs=self.most_lone_pairs)

    def num_listed(self, num_slots: int) -> int:
        """How many keys a step may attend on an instance of a group with KV of so many tokens."""
        return max(self.lists_a_slot * num_slots, self.keys_a_row * self.most_rows)

    def num_copied(self, num_slots: int) -> int:
        """How many of them are copied at most."""
        return min(self.most_copied, self.num_listed(num_slots))

    def has(self, work: InstanceWork) -> bool:
        """Whether such a step is captured, as far as one instance of the group can tell."""
        if work.num_hops:
            return self._has_ring(work)
        if work.num_tokens > self.most_rows or work.num_prompt_blocks > self.most_prompts:
            return False
        return self.has_few_keys(work, work.num_tokens) or self.has_room(work)

    def has_few_keys(self, work: InstanceWork, num_rows: int) -> bool:
        """Whether an instance attends few keys of prompts in a step of so many rows."""
        return num_rows >= self.least_copied and work.num_keys <= self.keys_a_row * num_rows

    def has_few_queries(self, work: InstanceWork) -> bool:
        """Whether a key meets so few queries that reading it is most of the work."""
        return work.num_pairs < self.least_queries * work.num_keys

    def has_room(self, work: InstanceWork) -> bool:
        """Whether an instance may attend all keys of prompts in a graph, and be no slower for it."""
        num_pairs = work.num_pairs + self.row_pairs * work.num_tokens
        return self.has_few_queries(work) or num_pairs <= self.most_pairs

    def _has_ring(self, work: InstanceWork) -> bool:
        """Of the others it is only known how many rows they bring on average."""
        if work.num_decode_keys or work.num_sent_queries or work.num_ring_blocks < work.num_blocks:
            return False
        num_own = max(work.num_tokens, work.num_keys - work.num_ring_keys)
        return max(num_own, work.num_ring_keys / work.num_hops) <= self.most_kv_rows


NO_GRAPHS = CudaGraphLimits(**dict.fromkeys(CudaGraphLimits.__slots__, 0))
