"""A server's process does without what only its workers need."""

import subprocess
import sys

PREPARED = """
import sys
from loong.launcher.serve import serving
from loong.launcher.cli import build_parser
from loong.launcher.serve.command import serve_config

serve_config(build_parser(["serve"])[0].parse_args(["serve"]))
raise SystemExit("torch" in sys.modules)
"""


def test_a_server_whose_workers_compute_does_not_import_torch() -> None:
    assert subprocess.run([sys.executable, "-c", PREPARED], check=False).returncode == 0
