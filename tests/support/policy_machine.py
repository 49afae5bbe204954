"""A policy's cluster: clients come and go, instances are lost and added, and reports come in any order."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from cluster_machine import ClusterMachine
from policies import num_instances_of
from simulation import instances_with, with_memory

from loong.core.events import BatchEndPredicted, InstanceDraining, RequestAborted
from loong.core.instance import MAX_SERVED_LEASES, Service, spread_over_hosts, with_host_tiers
from loong.core.plan import IterationPlan
from loong.core.snapshot import Snapshot
from loong.core.window_memory import WindowMemory
from loong.scheduler.config import PolicyConfig
from loong.scheduler.cost.cost_model import Coefficients, WorkCostModel
from loong.scheduler.policy import make_policy, policy_kind

POOL = 48  # tokens: any request fits one instance, and two seldom do
MAX_ROUNDS = 1000
MAX_LIVE = 12
CONFIG = PolicyConfig(lease_steps=3, max_num_batched_tokens=16, chunk_tokens=8)
WEIGHTS = {"arrive": 3, "abort": 1, "end soon": 3, "advance": 6, "migrate": 2, "lose": 1, "scale": 1}


class PolicyMachine(ClusterMachine):
    """A cluster that a policy plans for, whenever something has happened."""

    def __init__(
        self,
        name: str,
        serves: Service = Service.ALL,
        num_hosts: int = 1,
        *,
        max_served_leases: int = MAX_SERVED_LEASES,
        keeps_prefixes: bool = False,
        config: PolicyConfig = CONFIG,
        host_tokens: int = 0,
        memory: Sequence[int] = (),
        window: int | None = None,
    ) -> None:
        """On several hosts, some requests fit none of them. With `host_tokens`, instances have host tiers.

        Memory instances with `memory` tokens each come and go, and the others stay. Layers with a `window`
        have the least room that `loong serve --window-kv-tokens` takes.
        """
        policy, cost_model = make_policy(name, config), WorkCostModel()
        if host_tokens:  # all KV comes back: it takes no time
            cost_model = WorkCostModel(replace(Coefficients(), message=0.0, offloaded_key=0.0))
        num_instances = num_instances_of(name, 2 if host_tokens else 4)  # few, for KV to be short of room
        found = with_memory(instances_with([POOL] * num_instances, serves), memory)
        host_ids = (*spread_over_hosts(num_instances, num_hosts), *[0 for _ in memory])
        instances = {
            i.instance_id: replace(i, host_id=host_ids[i.instance_id], max_served_leases=max_served_leases)
            for i in found
        }
        self.longest = POOL - 10 if num_hosts == 1 else 3 * POOL

        def make_plan(_random: Random, snapshot: Snapshot) -> IterationPlan:
            return policy(snapshot, cost_model)

        tiers = with_host_tiers(tuple(instances.values()), num_instances, host_tokens)
        self.tier_ids = {i.tier_of: i.instance_id for i in tiers if i.tier_of is not None}
        windows = None
        if window is not None:
            num_batched_tokens = num_instances * config.max_num_batched_tokens
            windows = WindowMemory.of(window, 2 * (num_batched_tokens + window), num_batched_tokens)
        by_id = {i.instance_id: i for i in tiers}
        super().__init__(make_plan, by_id, keeps_prefixes=keeps_prefixes, windows=windows)
        kind = policy_kind(name)
        first = len(instances) - len(memory) if memory else kind.num_decode + 1
        numbers = range(first, len(instances) + 1)
        self.scales = [number for number in numbers if number % kind.group_size == 0]
        self.num_wanted = len(instances)
        self.weights = WEIGHTS if not host_tokens else {**WEIGHTS, "migrate": 4, "scale": 0}
        if memory:
            self.weights = {**WEIGHTS, "migrate": 4, "scale": 3}

    def check_event(self) -> None:
        """Leave it to the check after the next plan: events of random plans are checked one by one."""

    def teardown(self) -> None:
        """Once all wanted instances are there, the policy alone brings every request to its end.

        It also empties all draining instances.
        """
        random = Random(0)
        for instance_id in range(self.num_wanted):
            if instance_id not in self.workers.held:
                self.join(self.instances[instance_id])
                if instance_id in self.tier_ids:
                    self.join(self.instances[self.tier_ids[instance_id]])
        for _ in range(MAX_ROUNDS):
            self.end_drained()
            if not (self.view().request or self.view().following or self.view().draining_ids):
                break
            for migration_id in self.movable():
                self.finish_migration(migration_id, is_committed=True)
            if self.workers.batches:
                self.advance(min(self.workers.batches), random)
            self.commit(self.make_plan(random, self.view()))
        assert not self.view().request, "some requests never end"
        assert not self.view().following, "some requests never begin"
        assert not self.view().draining_ids, "some instances never drain"
        super().teardown()

    def lose_or_join(self, index: int) -> None:
        """Lose an instance and its host tier, or let both join."""
        super().lose_or_join(index)
        if index in self.tier_ids:
            super().lose_or_join(self.tier_ids[index])

    def scale(self, num_instances: int) -> None:
        """Let the instances of the highest ids drain, and others come."""
        self.num_wanted = num_instances
        for instance_id, instance in self.instances.items():
            is_there = instance_id in self.workers.held
            is_draining = instance_id in self.view().draining_ids
            if instance_id < num_instances and not is_there:
                self.join(instance)
            elif instance_id >= num_instances and is_there and not is_draining:
                self.apply(InstanceDraining(self.now(), instance_id))

    def end_drained(self) -> None:
        """Let instances leave that have drained, and come again if they are wanted."""
        for instance_id in sorted(self.view().drained_ids):
            self.leave(instance_id)
            if instance_id < self.num_wanted:
                self.join(self.instances[instance_id])

    def movable(self) -> list[int]:
        """Return the migrations that can finish: KV moves only when the batch that computes it has ended."""
        computing = {r for batch in self.workers.batches.values() for r in batch.run.plan.request_ids}
        return [n for n, m in self.workers.migrations.items() if m.segment.owner_id not in computing]

    def happen(self, random: Random) -> None:
        """Let one thing happen, or nothing."""
        match random.choices(tuple(self.weights), tuple(self.weights.values()))[0]:
            case "arrive" if len(self.view().request) < MAX_LIVE:
                num_prompt, max_tokens = self.num_prompt_tokens(random), random.randint(1, 9)
                num_choices = random.choice((1, 1, 1, 2)) if num_prompt < POOL // 3 else 1
                self.arrive_one(f"r{len(self.requests):04}", num_prompt, max_tokens, num_choices)
            case "abort" if live := sorted({*self.view().request, *self.view().ending_ids}):
                request_id = random.choice(live)
                self.ended.add(request_id)
                self.apply(RequestAborted(self.now(), request_id))
            case "end soon" if self.workers.batches:
                batch_id = random.choice(sorted(self.workers.batches))
                self.apply(BatchEndPredicted(self.now(), batch_id, self.now() + 1.0))
            case "advance" if self.workers.batches:
                self.advance(self.workers.first(random.choice(sorted(self.workers.batches))), random)
            case "migrate" if movable := self.movable():
                self.finish_migration(random.choice(movable), is_committed=random.random() < 0.7)
            case "lose" if random.random() < 0.1:
                self.lose_or_join(random.randint(0, self.num_wanted - 1))
            case "scale" if random.random() < 0.2:
                self.scale(random.choice(self.scales))

    def num_prompt_tokens(self, random: Random) -> int:
        """Draw the length of a prompt, of which few are longer than an instance's pool."""
        return random.randint(1, self.longest if random.random() < 0.2 else POOL - 10)

    def moment(self, random: Random) -> None:
        """Let some things happen at once, and plan."""
        self.end_drained()
        for _ in range(random.randint(1, 4)):
            self.happen(random)
        self.commit(self.make_plan(random, self.view()))
