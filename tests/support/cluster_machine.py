"""A state machine of clients, faults and workers around `ClusterState`; the workers count their own slots."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, count
from random import Random
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from loong.core.applied import Applied
from loong.core.errors import InvalidPlanError
from loong.core.events import (
    BatchEndPredicted,
    BatchFinished,
    BatchStarted,
    Event,
    InstanceDraining,
    InstanceJoined,
    InstanceLeft,
    InstanceLost,
    MigrationFinished,
    PrefixCacheReset,
    ProducedToken,
    RequestAborted,
    RequestArrived,
    RoomLent,
    RoomReturned,
    TokensProduced,
)
from loong.core.instance import ElasticInstance, ESPGroup, InstanceKind
from loong.core.instructions import (
    ExtendLease,
    Instruction,
    LendSlots,
    MoveKV,
    ReleaseKV,
    ReleaseWindows,
    RunBatch,
    RunScoredBatch,
    ShareKV,
    StopLease,
)
from loong.core.placement import InstanceId, KVSegment
from loong.core.plan import (
    BatchPlan,
    IterationPlan,
    KVMigration,
    Preemption,
    PreemptionReason,
    QueryBlock,
    Transfer,
)
from loong.core.request import Continuation, FinishReason, Request, RequestId, SamplingParams
from loong.core.snapshot import Snapshot
from loong.core.window_memory import WindowMemory
from loong.state.cluster_state import ClusterState

SPARE = 9
WINDOWS = WindowMemory(5, 45, 6)
HOST_ID = 5
INSTANCES = {
    **{i: ElasticInstance(i, 1, InstanceKind.FULL, 40) for i in range(4)},
    4: ElasticInstance(4, 1, InstanceKind.ATTENTION, 40),
    5: ElasticInstance(5, 2, InstanceKind.HOST, 60),
}
LARGER = {i: replace(instance, kv_capacity=100) for i, instance in INSTANCES.items()}  # than WINDOWS
STOP_TOKEN = 0
REPAIR = PreemptionReason.REPAIR
NEEDS: tuple[dict[str, Any], ...] = ({}, {"presence_penalty": 1.0}, {"repetition_penalty": 1.5})
seeds = st.integers(0, 2**32)
indexes = st.integers(0, 9)


@dataclass
class ToyBatch:
    """A batch as its group knows it."""

    run: RunBatch
    stop_step: int
    num_steps_taken: int = 0
    num_computed: dict[RequestId, int] = field(default_factory=dict)  # steps in which it took part
    left: set[RequestId] = field(default_factory=set)
    reported: set[RequestId] = field(default_factory=set)  # have got a token

    @property
    def sampled(self) -> list[RequestId]:
        """The requests that are to get a token in the next step."""
        given = (i for i in self.run.inputs if i.sampling_params is not None)
        request_ids = [
            r for i in given for r in (i.request_id, *(sibling.request_id for sibling in i.siblings))
        ]
        return [request_id for request_id in request_ids if request_id not in self.left]

    @property
    def is_done(self) -> bool:
        has_requests = self.sampled or self.num_steps_taken == 0
        return self.num_steps_taken >= self.stop_step or not has_requests


@dataclass
class ToyWorkers:
    """The slot that each instance has for each position of an owner, from instructions alone."""

    held: dict[InstanceId, dict[RequestId, dict[int, int]]] = field(default_factory=dict)
    slots: Iterator[int] = field(default_factory=count)  # each number is one slot, for ever
    made_for: dict[int, tuple[RequestId, int]] = field(default_factory=dict)  # request and position of a slot
    batches: dict[int, ToyBatch] = field(default_factory=dict)
    migrations: dict[int, KVMigration] = field(default_factory=dict)
    copies: set[int] = field(default_factory=set)  # of these, of KV that a batch reads meanwhile
    stopped: set[RequestId] = field(default_factory=set)  # with a token
    doomed: set[int] = field(default_factory=set)  # migrations of KV that a void batch was to make
    lent: dict[str, tuple[InstanceId, int]] = field(default_factory=dict)  # slots of loans
    windows: WindowMemory | None = None
    windowed: set[int] = field(default_factory=set)  # slots with KV in layers with a window
    garbage: set[int] = field(default_factory=set)  # those of them that were copied from others without
    num_window_dropped: int = 0

    def first(self, batch_id: int) -> int:
        """The batch that must end before this one, for its instances or requests; itself if there is none."""
        plan = self.batches[batch_id].run.plan
        group, request_ids = set(plan.group.instance_ids), set(plan.request_ids)
        before = ((n, b.run.plan) for n, b in self.batches.items())
        return next(
            n
            for n, other in before
            if group.intersection(other.group.instance_ids) or request_ids.intersection(other.request_ids)
        )

    def movable(self) -> list[int]:
        """Return the migrations of KV that no earlier batch still reads."""
        return sorted(
            migration_id
            for migration_id, migration in self.migrations.items()
            if migration_id in self.copies
            or not any(
                batch_id < migration_id and migration.segment.owner_id in batch.run.plan.request_ids
                for batch_id, batch in self.batches.items()
            )
        )

    def submit(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case RunBatch():
                    self.batches[instruction.batch_id] = ToyBatch(instruction, instruction.plan.num_steps)
                    for segment in instruction.plan.writes:
                        self.reserve(segment)
                    for segment in passing(instruction.plan):
                        self.reserve(segment)
                case ExtendLease():
                    self.extend(self.batches[instruction.batch_id], instruction.num_steps)
                case StopLease():
                    batch = self.batches[instruction.batch_id]
                    boundary = max(instruction.step, batch.num_steps_taken)
                    batch.stop_step = min(batch.stop_step, boundary)
                case MoveKV():
                    self.migrations[instruction.migration_id] = instruction.migration
                    if instruction.during_batch_id is not None:
                        self.copies.add(instruction.migration_id)
                    self.reserve(instruction.migration.arriving)
                    self.copy_makers(instruction.migration)
                    self.copy_windows(instruction)
                case LendSlots():
                    self.lent[instruction.loan_id] = instruction.instance_id, instruction.num_tokens
                case ReleaseKV() if instruction.owner_id in self.lent:
                    assert instruction.instance_ids == (self.lent.pop(instruction.owner_id)[0],)
                case ReleaseKV():
                    for instance_id in instruction.instance_ids:
                        self.free(instance_id, instruction)
                case ReleaseWindows():
                    for instance_id in instruction.instance_ids:
                        there = self.held[instance_id][instruction.owner_id]
                        gone = {there[p] for p in instruction.positions}
                        assert gone <= self.windowed, f"{instruction} releases nothing"
                        self.windowed -= gone
                        self.num_window_dropped += len(gone)
                case ShareKV():
                    for owner_id, positions, instance_id in instruction.segments:
                        slots = self.held[instance_id][instruction.user_id]
                        assert slots.keys().isdisjoint(positions), f"{instruction} has some already"
                        slots.update({p: self.held[instance_id][owner_id][p] for p in positions})

        self.check_windows()

    def check_windows(self) -> None:
        """Layers with a window have room for their KV, and have all that queries of batches see."""
        if self.windows is None:
            return
        for instance_id, owners in self.held.items():
            slots = {slot for slots in owners.values() for slot in slots.values()}
            if instance_id != HOST_ID:
                assert len(slots & self.windowed) <= self.windows.capacity
        for batch in self.batches.values():
            for given in batch.run.inputs:
                blocks = batch.run.plan.blocks_of(given.request_id)
                num_passed = batch.num_computed.get(given.request_id, 0)
                first = min(block.positions[0] for block in blocks) + num_passed - self.windows.window + 1
                for _, positions, instance_id in given.placement.segments:
                    there = self.held[instance_id][given.request_id]
                    assert {there[p] for p in positions if p >= first} <= self.windowed - self.garbage

    def copy_windows(self, move: MoveKV) -> None:
        """Copy the KV of layers with a window as far as there is some."""
        owner_id, positions, source_id = move.migration.segment
        sources, new = self.held[source_id][owner_id], self.held[move.migration.destination_id][owner_id]
        for position in positions:
            if any(position in windowless for windowless in move.windowless):
                self.windowed.discard(new[position])
            elif sources[position] not in self.windowed - self.garbage:
                self.garbage.add(new[position])

    def extend(self, batch: ToyBatch, num_steps: int) -> None:
        """Have slots for the steps to come; but every third group hears of them too late."""
        run = batch.run
        left = batch.left | self.stopped
        stops = {given.request_id: given.last_stop for given in run.inputs if given.request_id not in left}
        plan = run.plan.lengthened(num_steps, stops)
        for old, new in zip(run.plan.writes, plan.writes, strict=True):
            self.reserve(KVSegment(new.owner_id, new.positions[len(old.positions) :], new.instance_id))
        batch.run = replace(run, plan=plan)
        if run.batch_id % 3:
            batch.stop_step = num_steps

    def reserve(self, segment: KVSegment) -> None:
        slots = self.held[segment.instance_id][segment.owner_id]
        assert slots.keys().isdisjoint(segment.positions), f"{segment} has slots already"
        new = dict(zip(segment.positions, self.slots, strict=False))
        slots.update(new)
        self.windowed.update(new.values())
        self.made_for.update({slot: (segment.owner_id, position) for position, slot in new.items()})

    def copy_makers(self, migration: KVMigration) -> None:
        """Note who made the KV of an owner that is to be at its destination, too."""
        owner_id, positions, source_id = migration.segment
        sources, new = self.held[source_id][owner_id], self.held[migration.destination_id][owner_id]
        if not owner_id.startswith("r"):
            self.made_for.update({new[p]: self.made_for[sources[p]] for p in positions})

    def free(self, instance_id: InstanceId, release: ReleaseKV) -> None:
        owner_id, positions = release.owner_id, release.positions
        slots = self.held[instance_id][owner_id]
        gone = set(slots if positions is None else positions)
        if release.is_void:
            gone &= slots.keys()
        else:
            assert gone, f"instance {instance_id} is to free nothing of {owner_id}"
        assert gone <= slots.keys(), f"{gone - slots.keys()} of {owner_id} are not on instance {instance_id}"
        self.check_pinned(instance_id, owner_id, gone)
        for position in gone:
            del slots[position]

    def check_pinned(self, instance_id: InstanceId, owner_id: RequestId, gone: set[int]) -> None:
        """No batch that runs reads, at a member or a holder, what is released."""
        for batch_id, batch in self.batches.items():
            for given in batch.run.inputs:
                if given.request_id == owner_id:
                    read = {p for held in given.placement.on(instance_id) for p in held}
                    assert read.isdisjoint(gone), f"batch {batch_id} reads {read & gone} of {owner_id}"

    def finish(self, batch_id: int, ended: set[RequestId]) -> int:
        """The group is done: slots of steps that were not taken are free again."""
        batch = self.batches.pop(batch_id)
        self.drop_passing(batch)
        if batch.run.plan.num_steps > 1:
            writes = (
                s for s in batch.run.plan.writes if s.owner_id not in ended
            )  # of those all goes at once
            for segment in writes:
                num_steps = batch.num_computed.get(segment.owner_id, 0)
                for position in segment.positions[num_steps:]:
                    del self.held[segment.instance_id][segment.owner_id][position]
        return batch.num_steps_taken

    def drop_passing(self, batch: ToyBatch) -> None:
        """Drop the KV that a batch has pushed from where it was made."""
        for segment in passing(batch.run.plan):
            for position in segment.positions if segment.instance_id in self.held else ():
                del self.held[segment.instance_id][segment.owner_id][position]

    def drop_loans(self, instance_id: InstanceId) -> None:
        """Forget what an instance that is gone has lent."""
        self.lent = {loan_id: loan for loan_id, loan in self.lent.items() if loan[0] != instance_id}

    def lose(self, instance_id: InstanceId) -> list[ToyBatch]:
        """Return the batches that are void. Slots that they took stay until they are released."""
        self.drop_loans(instance_id)
        del self.held[instance_id]
        void, request_ids = list[ToyBatch](), set[RequestId]()
        for batch_id, batch in tuple(self.batches.items()):
            if instance_id in batch.run.participant_ids or request_ids.intersection(
                batch.run.plan.request_ids
            ):
                request_ids.update(batch.run.plan.request_ids)
                void.append(self.batches.pop(batch_id))
        self.doomed.update(
            migration_id
            for migration_id, migration in self.migrations.items()
            if migration_id not in self.copies
            for batch in void
            if batch.run.batch_id < migration_id and migration.segment.owner_id in batch.run.plan.request_ids
        )
        for migration_id, migration in tuple(self.migrations.items()):
            if instance_id in (migration.segment.instance_id, migration.destination_id):
                del self.migrations[migration_id]
        return void


class ClusterMachine(RuleBasedStateMachine):
    """Clients, faults and workers do anything in any order; `make_plan` plans for `instances`."""

    def __init__(
        self,
        make_plan: Callable[[Random, Snapshot], IterationPlan],
        instances: Mapping[InstanceId, ElasticInstance] = INSTANCES,
        *,
        keeps_prefixes: bool = False,
        windows: WindowMemory | None = None,
    ) -> None:
        super().__init__()
        self.make_plan, self.instances = make_plan, instances
        self.time = 0.0
        self.state, self.keeps_prefixes = (
            ClusterState(keeps_prefixes=keeps_prefixes, windows=windows),
            keeps_prefixes,
        )
        self.workers = ToyWorkers(windows=windows)
        self.requests: dict[RequestId, Request] = {}
        self.outputs: defaultdict[RequestId, list[int]] = defaultdict(list)
        self.ended: set[RequestId] = set()
        self.gone: set[RequestId] = set()
        self.unborn: set[RequestId] = set()  # siblings that no policy has seen
        self.scored: defaultdict[RequestId, set[int]] = defaultdict(set)  # positions of a prompt with choices
        self.whole: set[RequestId] = set()  # those whose prompt a batch that has ended completed
        self.lost: defaultdict[RequestId, set[int]] = defaultdict(set)  # positions that had KV
        self.num_recomputed = 0
        self.loan_numbers = count()

    def apply(self, event: Event) -> Applied:
        self.time = event.time
        applied = self.state.apply(event)
        self.workers.submit(applied.instructions)
        for request_id in begun_anew(applied.instructions):
            self.lost.pop(request_id, None)
        self.check_event()
        return applied

    def now(self) -> float:
        return self.time + 1.0

    def view(self) -> Snapshot:
        return self.state.snapshot(self.time)

    @initialize()
    def start(self) -> None:
        for instance in self.instances.values():
            self.join(instance)

    def join(self, instance: ElasticInstance) -> None:
        self.workers.held[instance.instance_id] = defaultdict(dict)
        self.apply(InstanceJoined(self.now(), instance))

    @rule(index=indexes)
    def lose_or_join(self, index: int) -> None:
        instance_id = sorted(self.instances)[index % len(self.instances)]
        if instance_id in self.workers.held:
            had = dict(self.lose(instance_id))
            applied = self.apply(InstanceLost(self.now(), instance_id))
            for request_id in begun_anew(applied.instructions):
                had.pop(request_id, None)
            for request_id, view in self.view().request.items():  # copies have taken the place of some
                self.lost[request_id] |= had.get(request_id, set()).intersection(chain(*view.missing))
            for view in self.view().following:  # which have none now
                self.lost[view.request_id] |= had.get(view.request_id, set())
        else:
            self.join(self.instances[instance_id])

    @rule(index=indexes)
    def drain_or_leave(self, index: int) -> None:
        """Let an instance that has drained leave; if there is none, let another begin to drain."""
        snapshot = self.view()
        if snapshot.drained_ids:
            self.leave(min(snapshot.drained_ids))
        elif staying := sorted(self.workers.held.keys() - snapshot.draining_ids):
            self.apply(InstanceDraining(self.now(), staying[index % len(staying)]))

    @rule(index=indexes, num_tokens=st.integers(1, 30))
    def lend(self, index: int, num_tokens: int) -> None:
        """Lend free room of an instance. What is in use stays there."""
        instance_id = sorted(self.instances)[index % len(self.instances)]
        before = self.view().instance.get(instance_id)
        has_room = before is not None and before.kv_free >= num_tokens
        loan_id = f"loan {next(self.loan_numbers)}"
        self.apply(RoomLent(self.now(), loan_id, instance_id, num_tokens))
        assert (loan_id in self.workers.lent) == has_room
        assert before is None or self.view().instance[instance_id].kv_used == before.kv_used

    @rule(index=indexes)
    def take_back(self, index: int) -> None:
        """End a loan, perhaps one that was refused, has ended or was lost."""
        loan_id = f"loan {index}"
        self.apply(RoomReturned(self.now(), loan_id, 0))
        assert loan_id not in self.workers.lent

    def leave(self, instance_id: InstanceId) -> None:
        assert not any(self.workers.held.pop(instance_id).values()), "it still has slots"
        self.workers.drop_loans(instance_id)
        self.apply(InstanceLeft(self.now(), instance_id))

    def lose(self, instance_id: InstanceId) -> Mapping[RequestId, set[int]]:
        """Lose an instance. Return the positions that surely had KV there."""
        writes = (s for batch in self.workers.batches.values() for s in batch.run.plan.writes)
        moving = (migration.segment for migration in self.workers.migrations.values())
        unsure = {
            (segment.owner_id, position)
            for segment in chain(writes, (s for s in moving if s.instance_id != instance_id))
            for position in segment.positions
        }
        unseen = self.unborn - self.view().request.keys()
        had = {
            request_id: {p for p in slots if (request_id, p) not in unsure}
            for request_id, slots in self.workers.held[instance_id].items()
            if request_id not in unseen
        }
        for batch in self.workers.lose(instance_id):
            for segment in batch.run.plan.writes if batch.run.plan.num_steps > 1 else ():
                if segment.instance_id == instance_id:
                    num_steps = batch.num_computed.get(segment.owner_id, 0)
                    had[segment.owner_id].update(segment.positions[:num_steps])
        return had

    @precondition(lambda self: len(self.requests) - len(self.gone) < 8)
    @rule(
        sizes=st.lists(
            st.tuples(st.integers(1, 30), st.integers(1, 9), st.integers(1, 3)), min_size=1, max_size=4
        )
    )
    def arrive(self, sizes: list[tuple[int, int, int]]) -> None:
        for num_prompt, max_tokens, num_choices in sizes:
            self.arrive_one(f"r{len(self.requests)}", num_prompt, max_tokens, num_choices)

    def arrive_one(self, request_id: RequestId, num_prompt: int, max_tokens: int, num_choices: int) -> None:
        needs = NEEDS[len(self.requests) % len(NEEDS)]
        params = SamplingParams(max_tokens=max_tokens, stop_token_ids=(STOP_TOKEN,), **needs)
        prompt = tuple(range(100, 100 + num_prompt))
        num_top = (None, 0, 3)[num_prompt % 3]
        request = Request(
            request_id,
            prompt,
            params,
            arrival_time=self.now(),
            num_choices=num_choices,
            num_prompt_logprobs=num_top,
            cache_salt="abc"[len(self.requests) % 7 // 3],
            uses_cache=len(self.requests) % 11 != 5,
        )
        if num_choices == 1 and max_tokens > 2 and len(self.requests) % 4 == 2:  # another engine began it
            request = replace(request, continues=Continuation((5, 6), 0.25), num_prompt_logprobs=None)
            self.outputs[request_id] += (5, 6)
        choices = {choice.request_id: choice for choice in request.choices()}
        self.requests.update(choices)
        self.unborn.update(choices.keys() - {request_id})
        self.apply(RequestArrived(self.now(), request))

    @rule(index=indexes)
    def abort(self, index: int) -> None:
        """Of a request in any state, ended and gone ones included."""
        if len(self.requests) > index:
            request_id = sorted(self.requests)[-index - 1]
            self.ended.add(request_id)
            self.apply(RequestAborted(self.now(), request_id))

    @rule()
    def reset_the_cache(self) -> None:
        self.apply(PrefixCacheReset(self.now()))
        assert not any(instance.kv_cached for instance in self.view().instances)

    @rule(seed=seeds, num_turns=st.integers(1, 40))
    def go_on(self, seed: int, num_turns: int) -> None:
        """Workers report and the policy plans, in any order."""
        random = Random(seed)
        for _ in range(num_turns):
            if self.workers.batches and random.random() < 0.2:
                batch_id = random.choice(sorted(self.workers.batches))
                self.apply(BatchEndPredicted(self.now(), batch_id, self.now() + 1.0))
            elif self.workers.batches and random.random() < 0.6:
                self.advance(self.workers.first(random.choice(sorted(self.workers.batches))), random)
            elif (movable := self.workers.movable()) and random.random() < 0.3:
                migration_id = random.choice(movable)
                self.finish_migration(migration_id, is_committed=random.random() < 0.7)
            else:
                self.commit(self.make_plan(random, self.view()))

    def commit(self, plan: IterationPlan) -> None:
        before = self.view()
        with pytest.raises(InvalidPlanError, match="nobody"):
            self.state.commit(replace(plan, preemptions=(*plan.preemptions, Preemption("nobody"))), before)
        assert self.view() == before
        try:
            instructions = self.state.commit(plan, before)
        except InvalidPlanError as error:
            if "layers with a window have room" not in str(error):
                raise
            assert self.view() == before
            return
        self.ended.update(failure.request_id for failure in plan.failures)
        for preemption in plan.preemptions:
            self.lost.pop(preemption.request_id, None)
        for eviction in plan.evictions:
            self.lost[eviction.segment.owner_id].update(eviction.segment.positions)
        for instruction in instructions:
            if isinstance(instruction, RunBatch):
                self.check_inputs(instruction)
        self.workers.submit(instructions)
        for request_id in begun_anew(instructions):
            self.lost.pop(request_id, None)
        self.check()

    def check_inputs(self, run: RunBatch) -> None:
        """Check that workers receive the right tokens, and the placement of the KV before them."""
        assert [given.request_id for given in run.inputs] == list(run.plan.request_ids)
        for given in run.inputs:
            prompt, outputs = self.requests[given.request_id].prompt_token_ids, self.outputs[given.request_id]
            known = [*prompt, *outputs]
            num_output_tokens = len(outputs) + (given.depends_on_batch_id is not None)
            blocks = run.plan.blocks_of(given.request_id)
            positions = sorted(p for block in blocks for p in block.positions)
            assert list(given.token_ids) == known[positions[0] : positions[-1] + 1]
            held = {p for segment in given.placement.segments for p in segment.positions}
            assert held.isdisjoint(positions)
            assert held.union(positions).issuperset(range(positions[-1]))
            assert (given.num_prompt_tokens, given.num_output_tokens) == (len(prompt), num_output_tokens)
            is_sampled = given.sampling_params is not None
            assert is_sampled == (positions[-1] == len(prompt) + num_output_tokens - 1)
            if given.depends_on_batch_id is not None:
                assert given.request_id in self.workers.batches[given.depends_on_batch_id].sampled
            params = self.requests[given.request_id].sampling_params
            needs_prompt, needs_output = params.repetition_penalty != 1, params.has_penalties
            assert given.prompt_token_ids == (prompt if is_sampled and needs_prompt else ())
            assert [*given.output_token_ids] == (outputs if is_sampled and needs_output else [])
            if given.siblings:
                assert is_sampled
                assert not outputs
                assert {sibling.request_id for sibling in given.siblings} <= self.unborn
        self.check_scored(run)

    def check_scored(self, run: RunBatch) -> None:
        """Just what was asked for is scored, until a batch that completes the prompt has ended."""
        scored = {chunk.request_id: chunk for chunk in run.scored} if isinstance(run, RunScoredBatch) else {}
        for given in run.inputs:
            request, chunk = self.requests[given.request_id], scored.get(given.request_id)
            positions = sorted(p for b in run.plan.blocks_of(given.request_id) for p in b.positions)
            is_rest = positions[0] < len(request.prompt_token_ids) - 1
            is_asked = request.num_prompt_logprobs is not None
            assert (chunk is not None) == (is_asked and is_rest and given.request_id not in self.whole)
            if chunk is not None:
                following = request.prompt_token_ids[positions[-1] + 1 : positions[-1] + 2]
                assert chunk.num_top == request.num_prompt_logprobs
                assert chunk.next_token_id == (following[0] if following else None)

    def score(self, run: RunBatch) -> None:
        """The workers find what they are to find of prompts."""
        for chunk in run.scored if isinstance(run, RunScoredBatch) else ():
            num_prompt_tokens = len(self.requests[chunk.request_id].prompt_token_ids)
            for block in run.plan.blocks_of(chunk.request_id):
                found = {p + 1 for p in block.positions if p + 1 < num_prompt_tokens}
                self.scored[chunk.request_id.partition("-")[0]] |= found

    def advance(self, batch_id: int, random: Random) -> None:
        batch = self.workers.batches[batch_id]
        if batch.is_done:
            for given in batch.run.inputs:
                if given.sampling_params is not None:
                    self.whole |= {given.request_id, *(sibling.request_id for sibling in given.siblings)}
                num_steps = (
                    batch.num_computed.get(given.request_id, 0) if batch.run.plan.num_steps > 1 else None
                )
                made = {
                    p for s in batch.run.plan.writes_of(given.request_id) for p in s.positions[:num_steps]
                }
                self.num_recomputed += len(made & self.lost[given.request_id])
                self.lost[given.request_id] -= made
            self.apply(BatchFinished(self.now(), batch_id, self.workers.finish(batch_id, self.ended)))
            return
        if batch.num_steps_taken == 0:
            assert not self.apply(BatchStarted(self.now(), batch_id)).needs_plan
            self.score(batch.run)
        step, sampled = batch.num_steps_taken, batch.sampled
        batch.num_steps_taken += 1
        for request_id in sampled:
            batch.num_computed[request_id] = step + 1
        cut = random.randint(0, len(sampled))  # two masters report in turn
        for part in (sampled[:cut], sampled[cut:]):
            tokens = tuple(self.token(batch, request_id, random) for request_id in part)
            self.apply(TokensProduced(self.now(), batch_id, step, tokens))

    def token(self, batch: ToyBatch, request_id: RequestId, random: Random) -> ProducedToken:
        token_id, outputs = random.randint(STOP_TOKEN, 12), self.outputs[request_id]
        batch.reported.add(request_id)
        request = self.requests[request_id]
        if request.num_prompt_logprobs is not None:  # with the first token all of the prompt is scored
            all_positions = {*range(1, len(request.prompt_token_ids))}
            assert self.scored[request_id.partition("-")[0]] == all_positions
        if request_id in self.workers.stopped:  # which was not known when this batch was sent
            batch.left.add(request_id)
            return ProducedToken(request_id, token_id, FinishReason.LENGTH)
        if request_id in self.ended:  # computed on: its workers do not know that it was aborted
            return ProducedToken(request_id, token_id)
        outputs.append(token_id)
        reason = self.requests[request_id].sampling_params.finish_reason(len(outputs), token_id)
        if random.random() < 0.05:
            reason = FinishReason.ERROR
        if reason is not None:
            batch.left.add(request_id)
            self.ended.add(request_id)
            self.workers.stopped.add(request_id)
        return ProducedToken(request_id, token_id, reason)

    def finish_migration(self, migration_id: int, is_committed: bool) -> None:
        del self.workers.migrations[migration_id]
        is_committed &= migration_id not in self.workers.doomed
        self.apply(MigrationFinished(self.now(), migration_id, is_committed))

    def check_event(self) -> None:
        """After every event."""
        self.check()

    def check(self) -> None:
        """After every plan, and unless a subclass changes `check_event`, after every event."""
        self.state.check()
        snapshot = self.view()
        self.check_slots(snapshot)
        self.check_batches(snapshot)
        self.check_ends(snapshot)

    def check_slots(self, snapshot: Snapshot) -> None:
        """Every position at rest has one slot, where its placement says; what is used is what is held."""
        for request_id, view in snapshot.request.items():
            slots = [(p, i) for i, owners in self.workers.held.items() for p in owners.get(request_id, ())]
            placed = [(p, s.instance_id) for s in view.placement.segments for p in s.positions]
            assert set(placed) <= set(slots)
            if view.batch_id is None and not view.is_migrating:
                assert sorted(slots) == sorted(placed)
                missing = [p for positions in view.missing for p in positions]
                assert sorted(missing + [p for p, _ in placed]) == [*range(view.num_known_tokens)]
                assert len(missing) == view.num_uncomputed_tokens
        self.check_contents(snapshot)
        used = {i.instance_id: i.kv_used + i.kv_cached for i in snapshot.instances}
        held = {
            i: {slot for slots in owners.values() for slot in slots.values()}
            for i, owners in self.workers.held.items()
        }
        assert used == {i: len(slots) for i, slots in held.items()}
        assert all(instance.kv_free >= 0 for instance in snapshot.instances)
        lent = Counter[InstanceId]()
        for instance_id, num_tokens in self.workers.lent.values():
            lent[instance_id] += num_tokens
        capacities = {i: one.kv_capacity for i, one in self.instances.items()}
        for instance in snapshot.instances:
            i = instance.instance_id
            assert instance.kv_capacity == capacities.get(i, instance.kv_capacity) - lent[i]
        assert snapshot.lent == lent
        num_recomputed = snapshot.stats.num_recomputed_tokens
        if self.workers.windows is None or not snapshot.stats.num_preemptions_by_reason.get(REPAIR):
            assert num_recomputed == self.num_recomputed
        else:  # a request that had lost all may have begun anew, which no instruction says
            assert num_recomputed <= self.num_recomputed

    def check_contents(self, snapshot: Snapshot) -> None:
        """Check that requests read KV of the same tokens and the same salt alone."""
        for request_id, view in snapshot.request.items():
            for segment in view.placement.segments:
                slots = self.workers.held[segment.instance_id][request_id]
                for position in segment.positions:
                    maker_id, made_position = self.workers.made_for[slots[position]]
                    assert made_position == position
                    if maker_id != request_id:
                        assert (
                            self.tokens(maker_id)[: position + 1] == self.tokens(request_id)[: position + 1]
                        )
                        assert self.requests[maker_id].cache_salt == self.requests[request_id].cache_salt

    def tokens(self, request_id: RequestId) -> list[int]:
        """Return all known tokens of a request."""
        return [*self.requests[request_id].prompt_token_ids, *self.outputs[request_id]]

    def check_batches(self, snapshot: Snapshot) -> None:
        """An instance and a request are in at most one batch, and the state knows which."""
        batches = self.workers.batches
        at_instances = [(i, b) for b, batch in batches.items() for i in batch.run.plan.group.instance_ids]
        at_requests = [(r, b) for b, batch in batches.items() for r in batch.run.plan.request_ids]
        busy = [(i.instance_id, i.batch_id) for i in snapshot.instances if i.batch_id is not None]
        busy += [(i, b.batch_id) for b in snapshot.ending for i in b.plan.group.instance_ids]
        assert sorted(at_instances) == sorted(busy)
        in_batch = [(r, v.batch_id) for r, v in snapshot.request.items() if v.batch_id is not None]
        in_batch += [(r, b.batch_id) for b in snapshot.ending for r in b.plan.request_ids]
        assert sorted(at_requests) == sorted(in_batch)

    def check_ends(self, snapshot: Snapshot) -> None:
        """A request ends once, and only for a reason; no token of it is lost or counted twice."""
        following = {view.request_id for view in snapshot.following}
        self.unborn -= snapshot.request.keys() | following
        leaving = (snapshot.ending_ids - snapshot.request.keys()) | following
        gone = self.requests.keys() - snapshot.request.keys() - self.unborn - leaving
        assert self.gone <= gone <= self.ended
        self.gone = gone
        views = (*snapshot.request.values(), *snapshot.following)
        num_siblings = sum(view.num_siblings for view in views)
        num_live = len(snapshot.request) + len(leaving) + num_siblings
        assert snapshot.stats.num_ended == len(self.requests) - num_live
        assert self.unborn - self.ended == set() or num_siblings
        assert snapshot.stats.num_window_dropped_tokens == self.workers.num_window_dropped
        for request_id, view in snapshot.request.items():
            assert view.has_ended == (request_id in self.ended)
            assert view.num_output_tokens == len(self.outputs[request_id]) + self.is_predicted(
                snapshot, request_id
            )

    def is_predicted(self, snapshot: Snapshot, request_id: RequestId) -> bool:
        """Return whether a batch that is ending is to give a request a token."""
        ending = (self.workers.batches[batch.batch_id] for batch in snapshot.ending)
        return request_id not in self.ended and any(
            request_id in batch.sampled and request_id not in batch.reported for batch in ending
        )

    def teardown(self) -> None:
        """Check that one spare instance is enough for all requests to end, after any events."""
        random = Random(0)
        self.join(ElasticInstance(SPARE, 1, InstanceKind.FULL, 10_000))
        num_rounds = 100 if self.workers.windows is None else 1000  # far more than any request has tokens
        for _ in range(num_rounds):
            while self.workers.batches or self.workers.migrations:
                while movable := self.workers.movable():
                    self.finish_migration(min(movable), is_committed=True)
                if self.workers.batches:
                    self.advance(min(self.workers.batches), random)
            if self.view().request:
                running = self.view().running
                self.commit(IterationPlan(preemptions=tuple(Preemption(v.request_id) for v in running)))
                most = None if self.workers.windows is None else 1  # of which all tokens have room
                self.commit(IterationPlan((whole_prefill(self.view(), most),)))
        self.check()
        assert self.gone | self.unborn == self.ended == self.requests.keys()
        assert all(instance.kv_used == 0 for instance in self.view().instances)
        if self.keeps_prefixes:
            for instance_id in sorted(self.workers.held.keys() - self.view().draining_ids):
                self.apply(InstanceDraining(self.now(), instance_id))
        assert not any(slots for owners in self.workers.held.values() for slots in owners.values())


def begun_anew(instructions: Iterable[Instruction]) -> list[RequestId]:
    """Return the requests that have no KV any more: they begin anew, or have ended."""
    releases = (i for i in instructions if isinstance(i, ReleaseKV) and not i.is_void)
    return [release.owner_id for release in releases if release.positions is None]


def passing(plan: BatchPlan) -> list[KVSegment]:
    """Return the segments that take slots where they are made, until they are pushed."""
    return [push.passing for push in plan.pushes if push.is_attended_in_place]


def whole_prefill(snapshot: Snapshot, most: int | None) -> BatchPlan:
    chunks = [(v.request_id, range(v.num_known_tokens)) for v in snapshot.waiting[:most]]
    return BatchPlan(
        ESPGroup((SPARE,)),
        tuple(QueryBlock(request_id, chunk, SPARE, Transfer.KV) for request_id, chunk in chunks),
        tuple(KVSegment(request_id, chunk, SPARE) for request_id, chunk in chunks),
    )
