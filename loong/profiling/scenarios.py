"""Scenarios that a profile runs: a few requests, one batch or migration at a time.

Everything that a policy may plan occurs: chunks of every transfer and retention, decode steps and leases with
every number of masters, decodes over KV that others serve, mixed batches, and migrations. Sizes and all other
choices are drawn; small sizes are as likely as large ones. The same seed generates the same scenario.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from random import Random
from typing import TypeAlias

from loong.core.cost.cost_model import CostModel
from loong.core.instance import MAX_SERVED_TOKENS, ESPGroup
from loong.core.placement import InstanceId
from loong.core.plan import BatchPlan, IterationPlan, KVMigration, Transfer
from loong.core.request import RequestId, RequestView
from loong.profiling.profiled_cluster import ProfiledCluster
from loong.scheduler.common.striping import (
    RequestPart,
    batch_of,
    decode_part,
    retained_part,
    striped_part,
    whole_part,
)

Scenario: TypeAlias = Iterator[IterationPlan]

MAX_PROMPTS = 4
MAX_AT_ONCE = 64  # prompts, in as many parts: workers capture steps of no more
MAX_CHUNKS = 6  # of a prompt
MAX_LEASE_STEPS = 16
MAX_MOVES = 4  # of a prompt's segments
NUM_CONTRASTS = 2  # of a short and a long prompt
LONG_PROMPT_TOKENS = 512  # the most of such a long prompt
LONG_PROMPT_SECONDS = 0.5  # the same, as predicted by the prior cost model
ROOM_FOR_OUTPUT = 64  # tokens of a request
LEAST_ROOM = 1024  # tokens of an instance
LEAST_CHUNK = 2  # tokens: one alone counts as a decode, but no captured step takes it


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds of a profile. Seconds are as predicted by the prior cost model.

    A chunk has up to `max_chunk_tokens` tokens on each instance that computes it.
    """

    max_chunk_tokens: int = 4096
    max_prompt_tokens: int = 1_000_000
    max_decode_requests: int = 64
    max_step_seconds: float = 0.2
    max_prompt_seconds: float = 0.5  # of all prompts of a scenario together


@dataclass(frozen=True, slots=True)
class ScenarioGenerator:
    """Generates one scenario on a group of instances of `cluster`."""

    cluster: ProfiledCluster
    group: ESPGroup
    limits: Limits
    prior: CostModel
    random: Random

    def prefill(self) -> Scenario:
        """Yield plans for a few prompts of different lengths, chunk by chunk."""
        longest = self._longest_prompt(MAX_PROMPTS)
        count = self.random.randint(1, MAX_PROMPTS)
        yield from self._compute([self._arrive(self._size(longest)) for _ in range(count)])

    def contrast(self) -> Scenario:
        """Yield plans for a short and a long prompt in turn, each in one step of one instance."""
        room = min(self._free().values()) // (2 * NUM_CONTRASTS)
        longest = min(room, LONG_PROMPT_TOKENS, self._timely(LONG_PROMPT_SECONDS, 1))
        for num_tokens in (LEAST_CHUNK, longest) * NUM_CONTRASTS:
            (view,) = self.cluster.views([self._arrive(num_tokens)])
            yield IterationPlan((batch_of(self.group, [self._whole(view, num_tokens)]),))

    def decode(self) -> Scenario:
        """Yield plans for many equal prompts: decode steps, leases, and steps with a late prompt.

        Each takes another subset of the requests, and leases have many lengths. So the costs of a batch, a
        step and a request can be separated.
        """
        room = min(self._free().values()) // (2 * ROOM_FOR_OUTPUT)
        count = self._size(min(self.limits.max_decode_requests, room))
        length = self._size(self._longest_prompt(count))
        crowd = [self._arrive(length) for _ in range(count)]
        yield from self._compute(crowd, at_once=True)
        for num_steps in (1, self._lease_steps(), 1, MAX_LEASE_STEPS, self._lease_steps(), 1):
            yield IterationPlan((self._decode_batch(crowd, num_steps),))
        late = self._arrive(self._size(self._longest_prompt(1) // 2))
        yield from self._compute([late], lambda: self._decode_batch(crowd, 1))

    def serve(self) -> Scenario:
        """Yield plans for leases on one instance, over KV that is on the whole group, where instances serve.

        Yields none for a group of one.
        """
        instance = self.cluster.snapshot().instance
        members = [instance[i] for i in self.group.instance_ids]
        if len(members) == 1 or not all(holder.can_serve(i) for i in members for holder in members):
            return
        room = min(self._free().values()) // (2 * ROOM_FOR_OUTPUT)
        count = self._size(min(self.limits.max_decode_requests, MAX_SERVED_TOKENS, room))
        longest = self._longest_prompt(count)
        crowd = [self._arrive(self._size(longest)) for _ in range(count)]
        yield from self._compute(crowd, at_once=True)
        alone = ESPGroup((self.random.choice(self.group.instance_ids),))
        for num_steps in (2, self._lease_steps(), 2, MAX_LEASE_STEPS):
            yield IterationPlan((self._decode_batch(crowd, num_steps, alone),))

    def move(self) -> Scenario:
        """Yield plans that move some of the KV of a prompt from instances of the group to others and back."""
        request_id = self._arrive(self._size(self._longest_prompt(1)))
        yield from self._compute([request_id])
        segments = self.cluster.views([request_id])[0].placement.segments
        for segment in self.random.sample(segments, min(MAX_MOVES, len(segments))):
            free = self.cluster.free()
            places = [i for i in free if i != segment.instance_id and free[i] >= len(segment.positions)]
            if places:
                there = KVMigration(segment, self.random.choice(places))
                yield IterationPlan(migrations=(there,))
                yield IterationPlan(migrations=(KVMigration(there.arriving, segment.instance_id),))

    def _arrive(self, num_prompt_tokens: int) -> RequestId:
        return self.cluster.arrive(max(LEAST_CHUNK, num_prompt_tokens), self.random)

    def _size(self, largest: int) -> int:
        """Draw a number from 1 to `largest`, or 1 if that is less; every order of magnitude is as likely."""
        return min(max(1, largest), int(max(2, largest + 1) ** self.random.random()))

    def _longest_prompt(self, count: int) -> int:
        """Return tokens such that `count` prompts fit on every instance within the time allowed."""
        room = min(self._free().values()) // count - ROOM_FOR_OUTPUT
        timely = self._timely(self.limits.max_prompt_seconds / count, self.group.dop)
        return min(room, timely, self.limits.max_prompt_tokens)

    def _timely(self, seconds: float, dop: int, num_cached: int = 0) -> int:
        """Return the tokens `dop` instances compute in this time, or in three times the least step's time."""
        terms = self.prior.prefill_terms(dop)
        return terms.max_tokens(max(seconds, 3 * terms.time(1, num_cached, 1)), num_cached)

    def _free(self, taken: BatchPlan | None = None) -> dict[InstanceId, int]:
        """Return the room on each instance of the group, less the slots that another batch takes."""
        free = self.cluster.free()
        for segment in taken.writes if taken is not None else ():
            free[segment.instance_id] -= len(segment.positions)
        return {instance_id: free[instance_id] for instance_id in self.group.instance_ids}

    def _lease_steps(self) -> int:
        return self.random.randint(2, MAX_LEASE_STEPS)

    def _compute(
        self,
        request_ids: Sequence[RequestId],
        with_batch: Callable[[], BatchPlan] | None = None,
        *,
        at_once: bool = False,
    ) -> Scenario:
        """Yield batches that compute all of these prompts, each merged with another batch if one is given.

        If `at_once`, a batch has as many prompts as possible, otherwise one or all of those left.
        """
        form = self.random.choice(self._forms(self.cluster.views(request_ids)))
        most = MAX_AT_ONCE if form == self._whole else MAX_AT_ONCE // self.group.dop
        while pending := [v for v in self.cluster.views(request_ids) if not v.is_decoding]:
            other = with_batch() if with_batch is not None else None
            count = len(pending) if at_once else self.random.choice((1, len(pending)))
            chosen = self.random.sample(pending, min(count, most))
            chunks = batch_of(self.group, self._chunks(chosen, form, self._free(other)))
            yield IterationPlan((chunks if other is None else _both(other, chunks),))

    def _forms(self, views: Sequence[RequestView]) -> Sequence["Form"]:
        """Return the ways to compute prompts; one instance alone only if it does not take much longer."""
        timely = self._timely(self.limits.max_prompt_seconds / len(views), 1)
        is_timely = all(view.num_prompt_tokens <= timely for view in views)
        forms = (self._striped_kv, self._striped_queries, self._retained)
        return (*forms, self._whole) if is_timely else forms

    def _chunks(
        self, views: Sequence[RequestView], form: "Form", free: Mapping[InstanceId, int]
    ) -> list[RequestPart]:
        """Return a chunk of each prompt, all of one size or the prompt's last."""
        num_cached = max(view.num_computed_tokens for view in views)
        dop = 1 if form == self._whole else self.group.dop
        timely = self._timely(self.limits.max_step_seconds, dop, num_cached)
        largest = min(timely, dop * self.limits.max_chunk_tokens, min(free.values())) // len(views)
        longest = max(view.num_prompt_tokens for view in views)
        size = max(LEAST_CHUNK, min(largest, max(longest // MAX_CHUNKS, self._size(largest))))
        return [form(view, _chunk_of(view.num_uncomputed_tokens, size)) for view in views]

    def _striped_kv(self, view: RequestView, num_tokens: int) -> RequestPart:
        return striped_part(view, num_tokens, self.group, Transfer.KV)

    def _striped_queries(self, view: RequestView, num_tokens: int) -> RequestPart:
        return striped_part(view, num_tokens, self.group, Transfer.QUERY)

    def _whole(self, view: RequestView, num_tokens: int) -> RequestPart:
        return whole_part(view, num_tokens, self.group.leader_id)

    def _retained(self, view: RequestView, num_tokens: int) -> RequestPart:
        keepers = self.group.instance_ids[: self.random.randint(1, self.group.dop)]
        return retained_part(view, num_tokens, self.group, dict.fromkeys(keepers, num_tokens))

    def _decode_batch(
        self, crowd: Sequence[RequestId], num_steps: int, group: ESPGroup | None = None
    ) -> BatchPlan:
        """Return a step or a lease of some of the requests, with a drawn subset of masters."""
        group = group or self.group
        some = self.random.sample(crowd, self._size(len(crowd)))
        masters = self.random.sample(group.instance_ids, self.random.randint(1, group.dop))
        turns = zip(self.cluster.views(some), cycle(masters))
        return batch_of(group, [decode_part(v, i, num_steps) for v, i in turns], num_steps)


Form: TypeAlias = Callable[[RequestView, int], RequestPart]
BATCH_KINDS: tuple[Callable[[ScenarioGenerator], Scenario], ...] = (
    ScenarioGenerator.prefill,
    ScenarioGenerator.decode,
)
KINDS = (*BATCH_KINDS, ScenarioGenerator.move)


def _chunk_of(num_left: int, size: int) -> int:
    """Return the tokens of the next chunk: `size`, or all that are left if one token would remain."""
    return num_left if num_left - size < LEAST_CHUNK else size


def _both(first: BatchPlan, second: BatchPlan) -> BatchPlan:
    return replace(first, queries=first.queries + second.queries, writes=first.writes + second.writes)
