"""A server's processes do without what only others need."""

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


def test_an_api_process_which_plans_nothing_does_not_import_numba() -> None:
    program = "import sys, loong.launcher.serve.api_process; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
