"""What makes a policy elastic, seen in virtual time."""

from random import Random

from simulation import Run, simulate, timed_request

from loong.core.cost_model import prefill_time
from loong.core.plan import BatchPlan
from loong.core.request import Request
from loong.scheduler.cost_model import WorkCostModel

MODEL = WorkCostModel()


def mixed_workload(num_requests: int, request_rate: float, seed: int) -> list[Request]:
    """A third short chats, a third documents, a third long documents; Poisson arrivals."""
    random, now, requests = Random(seed), 0.0, []
    for number in range(num_requests):
        now += random.expovariate(request_rate)
        shortest, longest = random.choice([(4, 36), (42, 3280), (236, 7770)])
        num_prompt = int(shortest * (longest / shortest) ** random.random())
        requests.append(timed_request(number, num_prompt, random.randint(2, 16), now))
    return requests


def batches_of(run: Run) -> list[BatchPlan]:
    return [batch for _, plan in run.plans for batch in plan.batches]


def test_a_mixed_workload_uses_many_dops_scales_up_and_down_and_retains() -> None:
    stats = simulate("esp", [16384] * 4, mixed_workload(80, request_rate=16, seed=1)).stats
    assert len(stats.num_batches_by_dop) >= 3
    assert stats.num_scale_ups > 0
    assert stats.num_scale_downs > 0
    assert stats.num_retained_tokens > 0
    assert stats.num_migrated_tokens == stats.num_preemptions == 0


def test_longer_prompts_get_more_instances() -> None:
    dops = [
        max(batch.group.dop for batch in batches_of(simulate("esp", [16384] * 4, [timed_request(0, n, 4)])))
        for n in (30, 2500, 4500, 7000)
    ]
    assert dops == sorted(dops)
    assert dops[0] == 1
    assert dops[-1] == 4


def test_a_long_prompt_decodes_on_one_instance_if_its_kv_fits_there() -> None:
    run = simulate("esp", [16384] * 4, [timed_request(0, 7000, 20)])
    assert [batch.group.dop for batch in batches_of(run) if batch.num_steps > 1] == [1, 1]
    assert run.stats.num_scale_downs == 1


def test_decode_that_outgrows_its_instance_takes_another_and_moves_nothing() -> None:
    run = simulate("esp", [100, 100], [timed_request(0, 70, 60)])
    assert run.stats.num_scale_ups == 1
    assert run.stats.num_migrated_tokens == run.stats.num_preemptions == 0


def test_short_prompts_start_soon_behind_a_long_one_on_every_instance() -> None:
    long = timed_request(0, 60_000, 4)
    shorts = [timed_request(n, 20, 4, n * 0.1) for n in range(1, 10)]
    run = simulate("esp", [20_000] * 4, [long, *shorts])
    longest_step = prefill_time(MODEL, 4 * 512, 60_000, 4)
    assert max(run.ttft(short) for short in shorts) < 3 * longest_step < run.ttft(long) / 5


def test_a_prompt_that_finds_only_leases_begins_at_the_end_of_their_step() -> None:
    first, second = timed_request(0, 20, 300), timed_request(1, 20, 4, 0.1)
    run = simulate("esp", [16384], [first, second])
    assert run.ttft(second) < 3 * prefill_time(MODEL, 20, 0, 1)


def test_decode_rides_along_with_a_prefill_that_takes_its_instance() -> None:
    decoding, long = timed_request(0, 20, 100), timed_request(1, 7000, 4, 0.05)
    run = simulate("esp", [16384] * 4, [decoding, long])
    mixed = [batch for batch in batches_of(run) if len(batch.request_ids) == 2 and batch.num_steps == 1]
    assert mixed
    gaps = [b - a for a, b in zip(run.token_times["r000"], run.token_times["r000"][1:], strict=False)]
    assert max(gaps) < 2 * prefill_time(MODEL, 4 * 512, 7000, 4)


def test_prefill_waits_a_step_for_the_instances_it_wants() -> None:
    decoding = [timed_request(n, 20, 200, n * 1e-3) for n in range(4)]
    run = simulate("esp", [16384] * 4, [*decoding, timed_request(9, 7000, 4, 0.1)])
    first = next(batch for batch in batches_of(run) if "r009" in batch.request_ids)
    assert first.group.dop == 4
    assert len(first.request_ids) == 5


def test_the_oldest_request_is_never_preempted() -> None:
    requests = [timed_request(n, 20, 60, n * 1e-3) for n in range(30)]
    run = simulate("esp", [150] * 3, requests)
    preempted = [(s, p.request_id) for s, plan in run.plans for p in plan.preemptions]
    assert preempted
    assert all(
        request_id != min(s.request.values(), key=lambda view: view.arrival_time).request_id
        for s, request_id in preempted
    )
