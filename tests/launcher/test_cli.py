"""What all commands have in common."""

import os
import signal
import subprocess
import sys

from loong.launcher.embedded import ENTRY


def test_whoever_has_seen_enough_may_stop_reading() -> None:
    reading_end, writing_end = os.pipe()
    os.close(reading_end)
    result = subprocess.run(
        [sys.executable, "-c", ENTRY, "workload", "describe", "mixed", "--num-requests", "3"],
        stdout=writing_end,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writing_end)
    assert result.returncode == 128 + signal.SIGPIPE
    assert not result.stderr
