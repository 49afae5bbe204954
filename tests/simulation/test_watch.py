from loong.core.events import ProducedToken, RequestArrived, TokensProduced
from loong.core.request import SLO, FinishReason, Request, SamplingParams
from loong.simulation.watch import Watch
from loong.workloads.metrics.backlog import MIN_REQUESTS
from loong.workloads.metrics.misses import Misses

SLOW_TTFT, SLOW_TPOT = 1.0, 0.1


def arrived(request_id: str, time: float) -> RequestArrived:
    slo = SLO(ttft=SLOW_TTFT, tpot=SLOW_TPOT)
    return RequestArrived(time, Request(request_id, range(3), SamplingParams(), slo, arrival_time=time))


def produced(request_id: str, time: float, *, is_last: bool = False) -> TokensProduced:
    reason = FinishReason.LENGTH if is_last else None
    return TokensProduced(time, 1, 0, (ProducedToken(request_id, 0, reason),))


def test_a_first_token_in_time_is_no_miss_and_one_too_late_is() -> None:
    watch = Watch(Misses((0,)))
    watch.take(arrived("a", 0.0))
    watch.take(arrived("b", 0.5))
    watch.take(produced("a", 1.0))
    assert not watch.is_hopeless
    watch.take(produced("b", 1.6))
    assert watch.is_hopeless


def test_a_deadline_that_has_passed_is_a_miss_whatever_comes_later() -> None:
    watch = Watch(Misses((0,)))
    watch.take(arrived("a", 0.0))
    watch.take(arrived("b", 1.1))
    assert watch.is_hopeless


def test_tokens_that_come_too_slowly_are_a_miss_at_the_end() -> None:
    watch = Watch(Misses((0,)))
    watch.take(arrived("a", 0.0))
    for time in (0.5, 0.9):
        watch.take(produced("a", time))
    assert not watch.is_hopeless
    watch.take(produced("a", 0.95, is_last=True))
    assert watch.is_hopeless


def test_a_request_misses_once_however_often_it_is_late() -> None:
    watch = Watch(Misses((1,)))
    watch.take(arrived("a", 0.0))
    for time in (2.0, 4.0):
        watch.take(produced("a", time))
    watch.take(produced("a", 6.0, is_last=True))
    assert not watch.is_hopeless


def test_tokens_are_noted_at_their_times() -> None:
    watch = Watch(Misses((0,)))
    watch.take(arrived("a", 0.0))
    watch.take(produced("a", 0.25))
    watch.take(produced("a", 0.5))
    assert list(watch.token_times["a"]) == [0.25, 0.5]


def test_requests_that_are_not_measured_neither_miss_nor_count() -> None:
    watch = Watch(Misses((0,)), measured=["a"])
    watch.take(arrived("a", 0.0))
    watch.take(arrived("b", 0.0))
    watch.take(produced("a", 0.5))
    watch.take(produced("b", 2.0))
    assert not watch.is_hopeless
    assert watch.token_times.keys() == {"a"}


def test_all_is_decided_once_every_measured_request_has_ended_or_missed() -> None:
    watch = Watch(Misses((9,)), measured=["a", "b"])
    watch.take(arrived("a", 0.0))
    watch.take(produced("a", 0.1, is_last=True))
    assert not watch.is_decided
    watch.take(arrived("b", 0.2))
    assert not watch.is_decided
    watch.take(arrived("c", 1.3))
    assert watch.is_decided


def test_a_last_token_that_can_no_longer_be_in_time_is_a_miss_before_it_comes() -> None:
    watch = Watch(Misses((0,)))
    watch.take(arrived("a", 0.0))
    num_tokens = SamplingParams().max_tokens
    watch.take(produced("a", 0.5))
    watch.take(produced("a", 0.5 + SLOW_TPOT * (num_tokens - 1)))
    assert not watch.is_hopeless
    watch.take(produced("a", 0.6 + SLOW_TPOT * (num_tokens - 1)))
    assert watch.is_hopeless


def test_a_backlog_that_has_grown_when_all_have_arrived_is_hopeless() -> None:
    names = [f"r{number:03}" for number in range(MIN_REQUESTS)]
    for seconds, is_hopeless in ((0.5, False), (900.0, True)):
        watch = Watch(measured=names, works=dict.fromkeys(names, 1.0))
        events: list[RequestArrived | TokensProduced] = [
            arrived(name, float(number)) for number, name in enumerate(names)
        ]
        events += [produced(name, number + seconds, is_last=True) for number, name in enumerate(names)]
        for event in sorted(events, key=lambda event: event.time):
            watch.take(event)
        assert watch.is_hopeless is is_hopeless
