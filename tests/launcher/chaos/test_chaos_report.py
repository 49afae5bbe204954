"""The verdict on a run under faults."""

from dataclasses import replace

import pytest

from loong.engine.faults import FaultKind
from loong.launcher.chaos.differences import Differences
from loong.launcher.chaos.report import EFFECT_SECONDS, Fault, Report, judged, with_recovery
from loong.launcher.chaos.server import ServerTotals
from loong.launcher.chaos.streams import Ending, StreamRecord

EXPECTED = [[1, 2, 3, 4], [5, 6]]
KILL = Fault(FaultKind.KILL, 2, 10.0)
WHOLE = Report(
    num_sent=2,
    endings={Ending.COMPLETE: 2},
    failures={},
    losses={},
    num_tokens=6,
    differences=Differences(),
    faults=[replace(KILL, recovery=0.5, num_streams=1)],
    skipped={},
    before=ServerTotals(1, 1, 2**20, 40),
    after=ServerTotals(3, 2, 2**21, 41),
    health="ok",
    is_interrupted=False,
)


def ended(ending: Ending, prompt_index: int, *token_ids: int) -> StreamRecord:
    return StreamRecord(prompt_index, 0.0, [*token_ids], [1.0] * len(token_ids), ending)


def streamed(*times: float) -> StreamRecord:
    return StreamRecord(0, 0.0, [7] * len(times), [*times], Ending.COMPLETE)


def test_streams_are_compared_with_the_output_of_their_own_prompt() -> None:
    found, endings = judged(
        EXPECTED,
        [
            ended(Ending.COMPLETE, 0, 1, 2, 3, 4),
            ended(Ending.COMPLETE, 1, 5),
            ended(Ending.FAILED, 0, 1, 2),
            ended(Ending.LOST, 0, 1, 9),
            ended(Ending.CUT_OFF, 1),
        ],
    )
    assert found == Differences(num_lost=1, num_changed=1)
    assert endings == {Ending.COMPLETE: 2, Ending.FAILED: 1, Ending.LOST: 1, Ending.CUT_OFF: 1}


def test_recovery_is_the_longest_wait_for_a_next_token_from_the_fault_on() -> None:
    on_its_way = streamed(9.0, 10.01, 12.0, 13.0)
    unaffected = streamed(9.5, 10.5, 11.5, 12.5)
    later = streamed(9.0, 10.0 + 2 * EFFECT_SECONDS, 30.0)
    assert with_recovery(KILL, [on_its_way]).recovery == pytest.approx(1.99)
    assert with_recovery(KILL, [unaffected]).recovery == pytest.approx(1.0)
    assert with_recovery(KILL, [later]).recovery == pytest.approx(2 * EFFECT_SECONDS)
    assert with_recovery(KILL, [on_its_way, unaffected]).num_streams == 2


def test_streams_without_a_token_before_or_after_the_fault_say_nothing_of_recovery() -> None:
    assert with_recovery(KILL, [streamed(), streamed(8.0, 9.0), streamed(11.0, 12.0)]) == KILL


def test_a_run_is_whole_unless_a_token_is_wrong_or_a_request_is_lost() -> None:
    assert WHOLE.is_whole
    assert replace(WHOLE, endings={Ending.COMPLETE: 1, Ending.FAILED: 1}).is_whole, "it failed by name"
    assert not replace(WHOLE, endings={Ending.COMPLETE: 1, Ending.LOST: 1}).is_whole
    for wrong in (Differences(1), Differences(0, 1), Differences(0, 0, 1)):
        assert not replace(WHOLE, differences=wrong).is_whole


def test_the_server_is_reported_by_its_increases_or_as_unknown() -> None:
    found = WHOLE.as_json()
    assert (found["num_instance_losses"], found["num_instance_joins"]) == (2, 1)
    text = "\n".join(WHOLE.lines())
    assert "2 lost, 1 joined again" in text
    assert "1.0 MiB, then 2.0 MiB" in text
    silent = replace(WHOLE, before=ServerTotals(), after=ServerTotals())
    assert "unknown lost" in "\n".join(silent.lines())
    assert silent.as_json()["num_instance_losses"] is None
