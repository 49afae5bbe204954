import subprocess
import sys

import pytest

from loong.runs.background_load import (
    ProcessorTime,
    background_load_note,
    processor_time,
    share_of_others,
)

WORKS = "sum(range(20_000_000)); print('done', flush=True); input()"


def test_others_are_processes_that_worked_and_were_not_ours() -> None:
    before = ProcessorTime(total=1_000, busy=600, ours=100)
    assert share_of_others(before, ProcessorTime(total=1_400, busy=900, ours=200)) == 0.5
    assert share_of_others(before, ProcessorTime(total=1_400, busy=650, ours=160)) == 0.0


def test_what_is_not_known_or_too_short_is_no_share() -> None:
    time = ProcessorTime(total=1_000, busy=600, ours=100)
    assert share_of_others(None, time) is None
    assert share_of_others(time, None) is None
    assert share_of_others(time, ProcessorTime(total=1_010, busy=610, ours=100)) is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux reports it")
def test_what_we_started_is_ours_while_it_runs_and_when_it_has_ended() -> None:
    before = processor_time()
    with subprocess.Popen(
        [sys.executable, "-c", WORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"done\n"
        during = processor_time()
        child.communicate(b"\n")
    after = processor_time()
    assert before is not None
    assert during is not None
    assert after is not None
    assert before.ours < during.ours <= after.ours


def test_a_little_background_load_is_not_reported() -> None:
    assert background_load_note({"esp": [0.02, None], "tp": [None]}) is None


def test_much_background_load_is_reported_with_whose_runs_it_met() -> None:
    reported = background_load_note({"esp": [0.4, 0.55], "static-sp": [0.03], "tp": [None]})
    assert reported is not None
    assert reported.startswith(
        "Other processes took 3 to 55 % of this machine's processors, 40 to 55 % while esp was measured and "
        "3 % while static-sp was. Times"
    )


def test_background_load_that_met_all_alike_is_reported_once() -> None:
    reported = background_load_note({"esp": [0.4], "tp": [0.42]})
    assert reported is not None
    assert reported.startswith("Other processes took 40 to 42 % of this machine's processors. Times")
