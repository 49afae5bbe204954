"""Numbers and sets in words."""

import pytest

from loong.core.decision import DecisionKind
from loong.core.request import FinishReason
from loong.observability.decision_log.lines import Cause, ConsideredAlternative, EventName, Reason
from loong.observability.decision_log.story import phrases
from loong.observability.decision_log.story.steps import WaitedFor


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "0 ms"),
        (0.00035, "0.35 ms"),
        (0.00999, "9.99 ms"),
        (0.009996, "10.0 ms"),
        (0.4124, "412 ms"),
        (0.99949, "999 ms"),
        (0.9996, "1.00 s"),
        (12.34, "12.3 s"),
        (4321.0, "4,321 s"),
    ],
)
def test_a_duration_has_three_digits_and_its_unit(seconds: float, words: str) -> None:
    assert phrases.duration(seconds) == words


def test_counts_agree_with_their_nouns() -> None:
    assert phrases.counted(1, "batch") == "1 batch"
    assert phrases.counted(2, "batch") == "2 batches"
    assert phrases.counted(1234, "token") == "1,234 tokens"
    assert [phrases.times(number) for number in (1, 2, 3)] == ["once", "twice", "3 times"]
    assert [phrases.verb("are", "a"), phrases.verb("are", "ab"), phrases.verb("run", "a")] == [
        "is",
        "are",
        "runs",
    ]


def test_long_lists_are_cut_where_that_makes_them_shorter() -> None:
    assert phrases.some_of("ab") == "a and b"
    assert phrases.some_of("abcde") == "a, b, c, d and e"
    assert phrases.some_of("abcdef") == "a, b, c, d and 2 more"


def test_instances_are_listed_or_spanned() -> None:
    assert phrases.instances((3,)) == "instance 3"
    assert phrases.instances((5, 0)) == "instances 0 and 5"
    assert phrases.instances((4, 1, 2, 3, 0)) == "instances 0 to 4"
    assert phrases.instances((5, 1, 2, 3, 0)) == "instances 0, 1, 2, 3 and 5"


def test_holdings_report_shares_where_there_are_several() -> None:
    assert phrases.holdings({2: 7, 3: 0}) == "instance 2"
    assert phrases.holdings({2: 7, 1: 1}) == "instances 1 (1 token) and 2 (7)"
    assert phrases.holdings({1: 3, 0: 3}) == "instances 0 and 1 (3 tokens each)"
    assert phrases.holdings({0: 499, 1: 500, 2: 493}) == "instances 0, 1 and 2 (about 500 tokens each)"


@pytest.mark.parametrize(
    ("event", "words"),
    [
        ("request_arrived", "r arrives"),
        ("request_aborted", "the client of r leaves"),
        ("tokens_produced", "a request of batch 1 ends"),
        ("lease_ending", "batch 1 has few steps left"),
        ("batch_finished", "batch 1 ends"),
        ("migration_finished", "migration 2 ends"),
        ("instance_lost", "instance 3 is lost"),
        ("instance_joined", "instance 3 joins"),
    ],
)
def test_every_cause_has_words(event: EventName, words: str) -> None:
    assert phrases.happenings([Cause(event, "r", 1, 2, 3)]) == words


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (FinishReason.ABORT, "the client of r leaves"),
        (FinishReason.STOP, "the answer to r is complete"),
        (FinishReason.ERROR, "r fails"),
    ],
)
def test_only_a_client_that_left_is_said_to_leave(reason: FinishReason, words: str) -> None:
    assert phrases.happenings([Cause("request_aborted", "r", reason=reason)]) == words


def test_all_that_called_for_a_plan_is_reported_but_no_end_twice() -> None:
    ended = [Cause("tokens_produced", batch_id=1), Cause("batch_finished", batch_id=1)]
    arrived = [Cause("request_arrived", request_id=f"r{number}") for number in range(6)]
    words = "batch 1 ends, r0 arrives, r1 arrives, r2 arrives and 3 more"
    assert phrases.happenings([*ended, *arrived]) == words


def test_predictions_are_compared_in_percent() -> None:
    assert phrases.difference(1.104, 1.0) == "10% more than predicted"
    assert phrases.difference(0.5, 1.0) == "50% less than predicted"
    assert phrases.difference(1.001, 1.0) == "as predicted"


def test_a_reason_names_what_was_passed_over() -> None:
    weighed = (
        ConsideredAlternative("1", 0.5),
        ConsideredAlternative("2", 0.25),
        ConsideredAlternative("4", None),
    )
    words = "The policy on DoP: 2 (250 ms), rather than 1 (500 ms) and 4 (impossible)."
    reasons = [
        Reason(DecisionKind.DOP, ("r",), "2", weighed),
        Reason(DecisionKind.MIGRATE, ("r",), "all on 0"),
    ]
    assert list(phrases.policy_words(reasons)) == [words, "The policy on moving KV: all on 0."]


def test_every_kind_of_decision_has_words() -> None:
    others = {DecisionKind.WAIT, DecisionKind.MISS}  # reported with their time, and with what was not read
    assert phrases.SUBJECTS.keys() == set(DecisionKind) - others


def test_what_was_waited_for_is_reported_with_its_time_and_what_took_least_together() -> None:
    waits = [WaitedFor(f"reason {n}", 0.9 - n / 10) for n in range(6)]
    assert list(phrases.wait_words(waits[:1])) == ["For 900 ms: reason 0."]
    assert list(phrases.wait_words(waits))[-2:] == ["For 600 ms: reason 3.", "For 900 ms: 2 other reasons."]
