"""`loong profile` on real workers, and a server that uses the result."""

import json
import subprocess
import sys
from pathlib import Path

from served import served

from loong.hardware.cost_model_file import read_cost_model
from loong.runs.spawned_server import ENTRY

SMALL = ("--num-instances", "2", "--kv-cache-tokens", "4k")


def loong(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", ENTRY, *arguments], capture_output=True, text=True)


def test_what_is_profiled_is_printed_written_and_served_by(tmp_path: Path) -> None:
    path = tmp_path / "tiny.json"
    sizes = ("--max-prompt-tokens", "400", "--max-decode-requests", "8")
    profiled = loong("profile", *SMALL, *sizes, "--duration", "1", "--output", str(path))
    assert profiled.returncode == 0, profiled.stderr
    file = read_cost_model(path)
    assert file.device == "cpu"
    assert file.num_instances == 2
    assert min(file.coefficients.values()) >= 0
    assert file.coefficients["message"] > 0
    assert list(file.ranges["dop"]) == [1, 2]
    assert "on groups of DoP 1 to 2 for about 1 s" in profiled.stdout.splitlines()[0]
    assert json.loads(profiled.stdout.splitlines()[-1])["errors"].keys() == file.errors.keys()

    with served(tmp_path, *SMALL, "--cost-model", str(path)) as server:
        for _ in range(3):
            server.client.completions.create(
                model="loong-tiny", prompt="once", max_tokens=20, extra_body={"ignore_eos": True}
            )
        assert f"the cost model is {path}" in server.log
        assert server.metric("loong:cost_model_relative_error") >= 0
