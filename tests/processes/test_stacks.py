"""The output of SIGUSR1 for a process that hangs."""

import signal
import subprocess
import sys

PROGRAM = """
import os, sys, threading
from loong.processes.logs import log_to_stderr
from loong.processes.stacks import stacks_on_request

def is_stuck_here():
    os.read(0, 1)

log_to_stderr("text")
with stacks_on_request("a program", lambda: print("asked", flush=True)):
    thread = threading.Thread(target=is_stuck_here, name="a thread", daemon=True)
    thread.start()
    print("ready", flush=True)
    thread.join()
print("over")
"""


def test_each_request_shows_where_all_threads_are() -> None:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        for _ in range(2):
            process.send_signal(signal.SIGUSR1)
            assert process.stdout.readline() == "asked\n"
        process.stdin.close()
        assert process.stdout.read() == "over\n"
        said = process.stderr.read()
    assert process.returncode == 0
    assert said.count(f"WARNING the threads of a program, process {process.pid}:\n    MainThread\n") == 2
    _, _, of_thread = said.rpartition("a thread\n")
    assert "is_stuck_here" in of_thread.splitlines()[0]
