"""The common flags of scripts, and one line of JSON with the machine and the numbers."""

import json
from argparse import ArgumentParser, RawTextHelpFormatter
from collections.abc import Mapping
from os import getloadavg
from pathlib import Path

from loong.hardware.machine import machine_facts
from loong.runs.background_load import SHARE_OF_OTHERS, processor_time, share_of_others

FOLDER = Path(__file__).parents[1] / "results"
LOAD_AT_START, TIME_AT_START = getloadavg()[0], processor_time()


def script_parser(name: str, description: str | None) -> ArgumentParser:
    """Return a parser with the flag `--save`, whose help shows the docstring of the script."""
    parser = ArgumentParser(description=description, formatter_class=RawTextHelpFormatter)
    parser.add_argument("--save", action="store_true", help=f"append the line to results/{name}.jsonl")
    return parser


def print_result(name: str, numbers: Mapping[str, object], *, save: bool) -> None:
    """Print the line; `save` appends it to NAME.jsonl."""
    result = {
        "benchmark": name,
        "machine": machine_facts(),
        "load_average": [LOAD_AT_START, getloadavg()[0]],
        SHARE_OF_OTHERS: share_of_others(TIME_AT_START, processor_time()),
        **numbers,
    }
    line = json.dumps(result)
    print(line)
    if save:
        with (FOLDER / f"{name}.jsonl").open("a") as file:
            file.write(line + "\n")
