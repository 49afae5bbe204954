"""A request that ends every instance that computes it fails by name under every policy, and no other does."""

from collections.abc import Iterator
from random import Random

import pytest
from cluster_machine import ToyBatch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from policies import POLICY_NAMES
from policy_machine import WEIGHTS, PolicyMachine
from simulation import instances_with, simulate, timed_request

from loong.core.events import BatchStarted, Event, InstanceJoined, InstanceLost
from loong.core.instance import Service
from loong.core.plan import Failure, FailureCause, IterationPlan
from loong.core.request import RequestId
from loong.scheduler.config import PolicyConfig
from loong.scheduler.tuning import MAX_LOSSES, MAX_OTHER_LOSSES

NUM_MOMENTS = 60
POOL = 100_000  # tokens: for all requests of a run
KILLER_SHARE = 0.2


class KillingMachine(PolicyMachine):
    """A cluster that loses an instance whenever a batch computes a certain position of certain requests."""

    def __init__(self, name: str, serves: Service = Service.ALL) -> None:
        super().__init__(name, serves)
        self.weights = {**WEIGHTS, "lose": 0}
        self.killers: dict[RequestId, int] = {}  # with their positions
        self.failures: list[Failure] = []
        self.num_kills = 0

    def arrive_one(self, request_id: RequestId, num_prompt: int, max_tokens: int, num_choices: int) -> None:
        before, random = set(self.requests), Random(request_id)
        super().arrive_one(request_id, num_prompt, max_tokens, num_choices)
        if random.random() < KILLER_SHARE:
            position = random.randrange(num_prompt + max_tokens)
            self.killers.update(dict.fromkeys(self.requests.keys() - before, position))

    def commit(self, plan: IterationPlan) -> None:
        self.failures += plan.failures
        super().commit(plan)

    def advance(self, batch_id: int, random: Random) -> None:
        batch = self.workers.batches[batch_id]
        if batch.is_done or not self.kills(batch):
            super().advance(batch_id, random)
            return
        self.num_kills += 1
        if not batch.num_steps_taken:
            self.apply(BatchStarted(self.now(), batch_id))
        victim = random.choice(batch.run.participant_ids)
        self.lose_or_join(victim)
        if victim < self.num_wanted:
            self.lose_or_join(victim)

    def kills(self, batch: ToyBatch) -> bool:
        """Return whether the next step of a batch computes a fatal position."""
        return any(
            self.killers[block.request_id] in block.at_step(batch.num_steps_taken).positions
            for block in batch.run.plan.queries
            if block.request_id in self.killers and block.request_id not in batch.left
        )

    def has_survived(self, request_id: RequestId) -> bool:
        """Return whether a request has a token that was sampled after its fatal position was computed."""
        num_prompt, num_output = (
            len(self.requests[request_id].prompt_token_ids),
            len(self.outputs[request_id]),
        )
        return num_output > 0 and num_prompt + num_output > self.killers[request_id] + 1


@pytest.mark.parametrize("name", POLICY_NAMES)
@examples(1, thorough=4)
@given(seed=st.integers(0, 2**32))
def test_the_request_at_fault_fails_by_name_and_no_other(name: str, seed: int) -> None:
    kill_instances(KillingMachine(name), Random(seed))


@pytest.mark.parametrize("serves", [Service.OWN_HOST, Service.NONE])
@examples(1, thorough=4)
@given(seed=st.integers(0, 2**32))
def test_so_it_is_where_instances_serve_decode_leases_alone_or_nothing(serves: Service, seed: int) -> None:
    kill_instances(KillingMachine("esp", serves), Random(seed))


def kill_instances(machine: KillingMachine, random: Random) -> None:
    machine.start()
    for _ in range(NUM_MOMENTS):
        machine.moment(random)
    machine.teardown()
    failed_ids = {failure.request_id for failure in machine.failures}
    assert {failure.cause for failure in machine.failures} <= {FailureCause.LOSSES}
    assert failed_ids <= machine.killers.keys(), "a request without fault failed"
    assert not any(map(machine.has_survived, machine.killers))
    assert machine.num_kills <= (MAX_LOSSES + MAX_OTHER_LOSSES) * len(machine.killers)


@pytest.mark.parametrize("name", ["esp", "esp-disaggregated-1", "esp-fixed-2", "chunked-replicas"])
def test_requests_that_advance_outlive_any_number_of_losses(name: str) -> None:
    """The longest prompt takes longer than the time between two losses."""
    requests = [timed_request(0, 40_000, 20), *(timed_request(n, 9000, 20, 0.5 * n) for n in range(1, 6))]
    incidents = [*losses(num_instances=4, number=50, seconds=1.5, random=Random(0))]
    config = PolicyConfig(max_num_batched_tokens=1024, chunk_tokens=1024)
    run = simulate(name, [POOL] * 4, requests, incidents=incidents, config=config)
    assert run.stats.num_losses == 50
    assert run.stats.num_failed == 0
    assert {i: len(tokens) for i, tokens in run.tokens.items()} == {r.request_id: 20 for r in requests}


def losses(num_instances: int, number: int, seconds: float, random: Random) -> Iterator[Event]:
    """Yield losses of random instances, `seconds` apart in the mean; each soon joins again."""
    at, joins_at = 0.0, [0.0] * num_instances
    for _ in range(number):
        victim = random.randrange(num_instances)
        at = max(at + random.expovariate(1 / seconds), joins_at[victim] + 0.01)
        joins_at[victim] = at + seconds / 8
        yield InstanceLost(at, victim, returns=True)
        yield InstanceJoined(joins_at[victim], instances_with([POOL] * num_instances)[victim])
