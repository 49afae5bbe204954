"""A server whose clients are answered by processes of their own."""

import signal
from pathlib import Path

import openai
import pytest
from served import Served, assert_gone, served, wait_until

from loong.server.api.listen import bound_socket


def endless_stream(server: Served) -> openai.Stream[openai.types.Completion]:
    """Return a stream that goes on."""
    return server.stream_of(60000)


def test_a_signal_while_some_processes_still_start_lets_requests_at_the_others_finish(tmp_path: Path) -> None:
    with served(tmp_path, "--api-server-count", "4", "--num-instances", "1") as server:
        stream = server.stream_of(100)  # as soon as one process answers
        server.process.send_signal(signal.SIGTERM)
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
        assert server.process.wait(60) == 0


def test_a_second_signal_ends_the_service_at_once_even_while_processes_start(tmp_path: Path) -> None:
    with served(tmp_path, "--api-server-count", "4", "--num-instances", "1") as server:
        processes = server.worker_pids()
        endless_stream(server)
        for _ in range(2):
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: "signal" in server.log, 60, "the first to be heard")
        assert server.process.wait(60) == 130
        assert_gone(processes)


def test_an_engine_that_is_killed_ends_streams_with_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with served(tmp_path, "--api-server-count", "2", "--num-instances", "2") as server:
        processes = server.processes
        stream = endless_stream(server)
        server.process.kill()
        with pytest.raises(openai.APIError, match="the engine of this server has stopped"):
            list(stream)
        server.process.wait(60)
        assert_gone(processes)
        with bound_socket(*server.address):
            pass  # the port is free
