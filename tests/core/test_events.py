"""Reports of several masters of one step become one event."""

from loong.core.events import BatchFinished, Event, ProducedToken, TokensProduced, joined


def test_tokens_of_one_step_that_follow_each_other_become_one_event_at_the_last_time() -> None:
    a, b, c = (ProducedToken(name, 7) for name in "abc")
    end = BatchFinished(0.4, 1, 2)
    events: list[Event] = [
        TokensProduced(0.1, 1, 0, (a,)),
        TokensProduced(0.2, 1, 0, (b,)),
        TokensProduced(0.3, 1, 1, (c,)),
        end,
        TokensProduced(0.5, 2, 1, (a,)),
    ]
    assert joined(events) == [TokensProduced(0.2, 1, 0, (a, b)), *events[2:]]
    assert joined([]) == []
