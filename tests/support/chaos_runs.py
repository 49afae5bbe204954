"""Runs of `loong chaos` with a small load."""

import subprocess
import sys

from loong.runs.spawned_server import ENTRY

LOAD = ("--num-prompts", "4", "--longest-prompt", "64", "--longest-output", "32", "--request-rate", "3")


def chaos_run(url: str, *arguments: str) -> "subprocess.Popen[str]":
    """Start a run against a server; its last line of output is the report."""
    command = [sys.executable, "-c", ENTRY, "chaos", "--base-url", url, *LOAD, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
