import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from loong.runs.spawned_server import ENTRY


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)])
def test_a_benchmark_that_is_stopped_before_it_measures_leaves_no_folder(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        command = [sys.executable, "-c", ENTRY, "bench", "--base-url", url]
        with (
            subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as bench,
            silent.accept()[0],  # it asks for the model, and waits
        ):
            bench.send_signal(number)
            _, errors = bench.communicate(timeout=60)
    assert bench.returncode == code
    assert errors == ("loong: interrupted\n" if number == signal.SIGINT else "")
    assert not [*tmp_path.iterdir()]
