"""The format of the server's log, and its behavior when it is not read."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from served import wait_until

from loong.launcher.serve.command import reported_choices
from loong.processes.logs import JsonLines, LineHandler, LineQueue, TextLines, write_all

MAX_BYTES = 1000
NUM_LINES = 20_000  # more than a pipe and the queue take


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Both ends; the sending one is for the test to close."""
    receiving, sending = os.pipe()
    yield receiving, sending
    os.close(receiving)


def queue_to(descriptor: int) -> LineQueue:
    return LineQueue(descriptor, lambda number: b"dropped %d\n" % number, MAX_BYTES)


def read_all(descriptor: int) -> bytes:
    """Read until no process can write any more."""
    return b"".join(iter(lambda: os.read(descriptor, 2**16), b""))


def test_a_notice_stands_for_the_lines_that_found_no_room(pipe: tuple[int, int]) -> None:
    receiving, sending = pipe
    queue = queue_to(sending)
    for number in range(NUM_LINES):
        queue.put(b"line %8d\n" % number)
    with ThreadPoolExecutor() as threads:
        reading = threads.submit(read_all, receiving)
        assert queue.close(60)
        os.close(sending)
    found, num_dropped = 0, 0
    for line in reading.result().splitlines():
        kind, number_or_count = line.split()
        if kind == b"line":
            assert int(number_or_count) == found
            found += 1
        else:
            found += int(number_or_count)
            num_dropped += int(number_or_count)
    assert found == NUM_LINES
    assert num_dropped == queue.num_dropped > 0


def test_a_log_that_nobody_reads_is_given_up_at_the_end(pipe: tuple[int, int]) -> None:
    receiving, sending = pipe
    queue = queue_to(sending)
    for number in range(NUM_LINES):
        queue.put(b"line %8d\n" % number)
    assert not queue.close(0)
    with ThreadPoolExecutor() as threads:
        reading = threads.submit(read_all, receiving)
        assert queue.close(60)
        os.close(sending)
    assert reading.result().endswith(b"\n")


def test_lines_that_cannot_be_written_are_dropped_and_others_follow(pipe: tuple[int, int]) -> None:
    receiving, sending = pipe
    descriptor = os.open("/dev/full", os.O_WRONLY)
    queue = queue_to(descriptor)
    queue.put(b"first\n")
    wait_until(lambda: queue.num_dropped == 1, 60, "the line to be dropped")
    os.dup2(sending, descriptor)
    os.close(sending)
    queue.put(b"second\n")
    assert queue.close(60)
    os.close(descriptor)
    assert read_all(receiving) == b"second\ndropped 1\n"


def test_a_descriptor_that_does_not_block_takes_all(pipe: tuple[int, int]) -> None:
    receiving, sending = pipe
    os.set_blocking(sending, False)
    data = bytes(range(256)) * 4096
    with ThreadPoolExecutor() as threads:
        reading = threads.submit(read_all, receiving)
        write_all(sending, data)
        os.close(sending)
    assert reading.result() == data


PROGRAM = """
import logging, subprocess, sys, warnings
from loong.processes.logs import child_stderr, num_dropped_records, queued_log

with queued_log("json"):
    logging.info("a record")
    warnings.warn("a warning")
    subprocess.run(["sh", "-c", r"printf 'of a \\033[31mchild\\n' >&2"], stderr=child_stderr())
    print("stray", file=sys.stderr)
    try:
        1 / 0
    except ZeroDivisionError:
        logging.exception("no number")
    for _ in range(int(sys.argv[1])):
        logging.info("%1000d", 1)
    print(num_dropped_records())
print("afterwards", file=sys.stderr)
"""


def program(num_lines: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", PROGRAM, str(num_lines)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_all_that_a_process_and_its_children_say_is_in_the_log() -> None:
    with program(0) as running:
        num_dropped, said = running.communicate()
    assert int(num_dropped) == 0
    *lines, last = said.splitlines()
    assert last == "afterwards"
    assert {"stray", r"of a \u001b[31mchild"} < set(lines)
    records = [json.loads(line) for line in lines if line.startswith("{")]
    assert [record["level"] for record in records] == ["INFO", "WARNING", "ERROR"]
    assert "a warning" in records[1]["message"]
    assert records[2]["exception"].endswith("ZeroDivisionError: division by zero")


def test_a_process_whose_log_nobody_reads_ends() -> None:
    with program(2000) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert int(running.stdout.read()) > 1000
        assert running.wait(60) == 0
        assert "a record" in running.stderr.readline()


def test_a_json_line_says_when_what_and_by_whom() -> None:
    record = logging.LogRecord("loong.engine.engine", logging.WARNING, "", 0, "%d of\n%s", (3, "ü"), None)
    record.created = 86400.25
    (line,) = JsonLines().format(record).splitlines()
    assert json.loads(line) == {
        "time": "1970-01-02T00:00:00.250+00:00",
        "level": "WARNING",
        "logger": "loong.engine.engine",
        "message": "3 of\nü",
    }


def test_a_json_line_holds_the_exception() -> None:
    try:
        int("no")
    except ValueError:
        record = logging.LogRecord("loong", logging.ERROR, "", 0, "failed", (), sys.exc_info())
    (line,) = JsonLines().format(record).splitlines()
    assert json.loads(line)["exception"].endswith("'no'")


@pytest.mark.parametrize("formatter", [TextLines(), JsonLines()])
def test_a_record_holds_no_control_character_of_a_client(formatter: logging.Formatter) -> None:
    lines: list[bytes] = []
    handler = LineHandler(lines.append, formatter)
    handler.handle(logging.LogRecord("a", logging.INFO, "", 0, "from %s", ("\x1b[31m\x9b\r\x00",), None))
    assert not set(lines[0].decode()[:-1]) & {"\x1b", "\x9b", "\r", "\x00", "\n"}
    assert b"from \\u001b[31m\\u009b" in lines[0]


def test_what_a_client_sends_begins_no_line_of_a_text_log() -> None:
    lines: list[bytes] = []
    handler = LineHandler(lines.append, TextLines())
    forged = "a\n1970-01-01 00:00:00,000 ERROR the server is yours"
    handler.handle(logging.LogRecord("a", logging.INFO, "", 0, "from %s", (forged,), None))
    first, second = lines[0].decode().splitlines()
    assert first.endswith(" INFO from a")
    assert second == "    1970-01-01 00:00:00,000 ERROR the server is yours"


def test_choices_are_reported_without_secrets() -> None:
    reported = reported_choices({"port": 8001, "api_key": ["hunter2"]})
    assert "port 8001" in reported
    assert "api-key ***" in reported
    assert "hunter2" not in reported
