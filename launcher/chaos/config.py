"""The configuration of `loong chaos`, and the notation of its rates and times."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from loong.engine.faults import FaultKind

_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class ChaosConfig:
    """A load, and the faults to inject under it. Times are seconds.

    `intervals` are the mean times between two faults of a kind.
    """

    base_url: str
    model: str | None
    api_key: str | None
    admin_key: str | None
    intervals: Mapping[FaultKind, float]
    pause_time: float = 25.0
    duration: float = 60.0
    request_rate: float = 2.0
    num_prompts: int = 16
    longest_prompt: int = 1024
    longest_output: int = 128
    request_timeout: float = 120.0
    seed: int = 0


def duration(text: str) -> float:
    """Parse a time above 0: 90, 90s, 5m, 1.5h or 500ms, in seconds."""
    unit = next((unit for unit in _UNITS if text.endswith(unit)), "")
    try:
        value = float(text.removesuffix(unit)) * _UNITS.get(unit, 1.0)
    except ValueError:
        value = 0.0
    if not 0 < value < inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no time above 0 such as 90, 90s, 5m or 1h")
    return value


def interval(text: str) -> float:
    """Parse a rate of faults such as 1/30s or 2/1m. Return the seconds between two of them."""
    number, slash, time = text.partition("/")
    if not slash or not number.isascii() or not number.isdigit() or int(number) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no rate of faults such as 1/30s or 2/1m")
    return duration(time) / int(number)
