import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from served import wait_until

from loong.launcher.embedded import ENTRY


def test_a_benchmark_that_is_terminated_leaves_no_folder() -> None:
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        command = [sys.executable, "-c", ENTRY, "bench", "--base-url", url]
        with subprocess.Popen(command, env=os.environ | {"TMPDIR": folder}, stderr=subprocess.PIPE) as bench:
            wait_until(lambda: [*Path(folder).glob("loong-bench-*")] != [], 60, "the benchmark to begin")
            bench.send_signal(signal.SIGTERM)
            bench.communicate(timeout=60)
        assert bench.returncode == 128 + signal.SIGTERM
        assert not [*Path(folder).iterdir()]
