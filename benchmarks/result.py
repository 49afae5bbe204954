"""How a benchmark ends: one line of JSON with the machine beside the numbers, kept where it is asked for."""

import json
from collections.abc import Mapping
from os import getloadavg
from pathlib import Path

from loong.launcher.machine import machine_facts

FOLDER = Path(__file__).parent / "results"


def print_result(name: str, load_before: float, numbers: Mapping[str, object], *, save: bool) -> None:
    """Print the line; `save` appends it to NAME.jsonl. `load_before` is the load average at the start."""
    result = {
        "benchmark": name,
        "machine": machine_facts(),
        "load_average": [load_before, getloadavg()[0]],
        **numbers,
    }
    line = json.dumps(result)
    print(line)
    if save:
        with (FOLDER / f"{name}.jsonl").open("a") as file:
            file.write(line + "\n")
