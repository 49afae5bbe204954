"""The course of each request as it is kept for people to look at."""

from loong.core.applied import Applied
from loong.core.cluster_history import RequestSpan
from loong.core.events import BatchFinished, ProducedToken, RequestAborted, RequestArrived, TokensProduced
from loong.core.plan import Failure, IterationPlan
from loong.core.request import FinishReason, Request, SamplingParams
from loong.core.snapshot import Snapshot
from loong.observability.request_spans import RequestSpans
from loong.observability.timeline import Timeline


def arrived(request_id: str, time: float, num_tokens: int = 5) -> RequestArrived:
    return RequestArrived(time, Request(request_id, range(num_tokens), SamplingParams(), arrival_time=time))


def produced(time: float, request_id: str, reason: FinishReason | None = None) -> TokensProduced:
    return TokensProduced(time, 1, 0, (ProducedToken(request_id, 7, reason),))


def test_a_request_is_followed_from_its_arrival_to_its_end() -> None:
    spans = RequestSpans()
    for event in (
        arrived("a", 1.0),
        arrived("b", 2.0, 8),
        produced(3.0, "a"),
        BatchFinished(3.5, 1, 1),
        produced(4.0, "a", FinishReason.LENGTH),
    ):
        spans.on_event(event)
    ended, live = spans.spans()
    assert ended == RequestSpan("a", 5, 1.0, 3.0, 4.0, FinishReason.LENGTH)
    assert live == RequestSpan("b", 8, 2.0)


def test_tokens_of_one_whose_client_left_change_nothing() -> None:
    spans = RequestSpans()
    for event in (
        arrived("a", 1.0),
        RequestAborted(2.0, "a"),
        RequestAborted(2.5, "a"),
        produced(3.0, "a", FinishReason.STOP),
    ):
        spans.on_event(event)
    assert spans.spans() == (RequestSpan("a", 5, 1.0, None, 2.0, FinishReason.ABORT),)


def test_an_answer_that_is_complete_before_its_tokens_ends_as_the_answer_does() -> None:
    spans = RequestSpans()
    for event in (
        arrived("a", 1.0),
        produced(2.0, "a"),
        RequestAborted(2.5, "a", FinishReason.STOP),
        produced(3.0, "a", FinishReason.LENGTH),
    ):
        spans.on_event(event)
    assert spans.spans() == (RequestSpan("a", 5, 1.0, 2.0, 2.5, FinishReason.STOP),)


def test_a_request_that_a_plan_gives_up_ends_in_an_error() -> None:
    timeline = Timeline()
    timeline.on_event(arrived("a", 1.0), Applied())
    plan = IterationPlan(failures=(Failure("a", "no room"),))
    timeline.on_plan([], Snapshot(1.5, ()), plan, ())
    assert timeline.history().requests == (RequestSpan("a", 5, 1.0, None, 1.5, FinishReason.ERROR),)


def test_no_more_are_kept_than_asked_for() -> None:
    spans = RequestSpans(max_bytes=700)  # of spans of some 320
    for name in "abc":
        spans.on_event(arrived(name, 1.0))
        spans.on_event(RequestAborted(2.0, name))
    assert [span.request_id for span in spans.spans()] == ["b", "c"]
