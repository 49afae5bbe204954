"""The steps of simulated batches: how long each takes, and what delays it."""

from dataclasses import replace

from loong.core.cost.cost_model import CostModel
from loong.core.placement import InstanceId
from loong.core.plan import KVMigration
from loong.executor.lease_work import LeaseWork
from loong.executor.moving_kv import MovingKV
from loong.executor.processors import Processors
from loong.executor.simulated_batch import SimulatedBatch
from loong.scheduler.cost.idle_tracker import IdleTracker

HIDDEN_SHARE = 0.5  # of the time to send a batch that is hidden if another ran for as long


class SimulatedSteps:
    """The batches that are `running` or sent, by id, and their steps by the clock of the cost model.

    A step that instances outside its group serve delays the steps that run there, and so do moves of KV.
    Sending a batch while another runs takes less time, by up to HIDDEN_SHARE.
    """

    def __init__(self, cost_model: CostModel, processors: Processors) -> None:
        self.running: dict[int, SimulatedBatch] = {}
        self._cost_model, self._processors = cost_model, processors
        self._idle_tracker = IdleTracker(cost_model.host.idle)
        self._computing: dict[InstanceId, int] = {}  # the batch that each instance is a member of
        self._moving = MovingKV(cost_model)

    def begin(self, batch_id: int, now: float) -> None:
        """Start the first step of a batch."""
        running = self.running[batch_id]
        plan = running.plan
        starts_idle = self._idle_tracker.were_idle(plan.group.instance_ids, now)
        running.work = LeaseWork(plan, running.placements, starts_idle=starts_idle)
        self._computing.update(dict.fromkeys(plan.group.instance_ids, batch_id))
        self._start(batch_id, running, now, self._hidden(running, now))

    def end(self, batch_id: int, now: float) -> bool:
        """End a step, and start the next one; return whether there is one."""
        running = self.running[batch_id]
        running.take_step()
        if running.sampled and running.num_steps_taken < running.last_step:
            self._start(batch_id, running, now)
            return True
        self._idle_tracker.work(running.plan.group.instance_ids, now)
        return False

    def leave(self, batch_id: int) -> None:
        """Let the members of a batch go, which has ended or is void."""
        self._computing = {i: computed for i, computed in self._computing.items() if computed != batch_id}

    def cancel(self, batch_id: int, now: float) -> None:
        """Stop the present step of a batch that is void, if it has one."""
        if self.running.pop(batch_id, None) is not None:
            self._processors.cancel(batch_id, now)

    def move(self, migration: KVMigration, now: float) -> float:
        """Start a move, and return the time of its end."""
        end, carrying = self._moving.start(migration, now)
        for link in carrying:
            if (batch_id := self._computing.get(link.instance_id)) is not None:
                overlap = min(link.end, self.running[batch_id].step_ends_at) - link.begin
                self._processors.delay(batch_id, self._moving.lost_share * max(0.0, overlap))
        return end

    def _hidden(self, running: SimulatedBatch, now: float) -> float:
        """Return the seconds that a batch saves because it was sent while another ran."""
        waited, first = now - running.submitted_at, running.work.step
        if not waited:
            return 0.0
        step_time = self._cost_model.step_time
        return min(waited, HIDDEN_SHARE * (step_time(first) - step_time(replace(first, is_first=False))))

    def _start(self, batch_id: int, running: SimulatedBatch, now: float, hidden: float = 0.0) -> None:
        step = running.work.step
        if step.holders:
            idle_ids = frozenset(i for i in step.holders if i not in self._computing)
            others = [other for i, other in self.running.items() if i != batch_id]
            served_time = self._cost_model.served_time
            shares = {i: sum(o.read_share(i, served_time) for o in others) for i in step.holders}
            running.read_shares = {i: share for i, share in shares.items() if i in idle_ids}
            step = replace(step, idle_holder_ids=idle_ids, read_shares=shares)
        seconds = running.slowness * (self._cost_model.step_time(step) - hidden)
        running.step_ends_at = ends_at = now + seconds
        group = running.plan.group.instance_ids
        seconds += max(self._moving.lost_seconds(i, now, ends_at) for i in group)
        running.step_seconds = seconds
        self._processors.start(batch_id, now, seconds, running.plan.group.dop)
        delays: dict[int, float] = {}  # by batch, which waits for the member that serves longest
        for instance_id, work in step.holders.items():
            if (delayed_id := self._computing.get(instance_id)) is not None:
                served = self._cost_model.served_time(work)
                delays[delayed_id] = max(served, delays.get(delayed_id, 0.0))
        for delayed_id, delay in delays.items():
            self._processors.delay(delayed_id, delay)
