"""`loong simulate --replay`: checks that the policy makes the decisions of a recorded run again."""

import asyncio
import difflib
import sys
from pathlib import Path

import msgspec

import loong
from loong.engine.replay import PlanDifference, plan_again, replay
from loong.observability.recording.lines import PlanRecord, RefusedPlanRecord, Setting
from loong.observability.recording.reader import read_recording


def replay_and_report(path: Path) -> int:
    """Replay a recording and say whether its plans are the same; 0 if they are, else 1.

    A refused plan is made again instead.

    Raises `ConfigError` if the file is no recording, `InvalidPlanError` if the policy now breaks a rule.
    """
    recording = read_recording(path)
    if recording.is_cut:
        print(f"{path} breaks off in its last line, which is left out", file=sys.stderr)
    if recording.refused is not None:
        return _report_refused(recording.setting, recording.refused)
    result = asyncio.run(replay(recording))
    if result.difference is None:
        print(f"identical: {result.num_plans:,} plans on {recording.num_events:,} events")
        return 0
    print(_described(result.difference))
    if recording.setting.loong_version != loong.__version__:
        print(f"(recorded by loong {recording.setting.loong_version}; this is {loong.__version__})")
    return 1


def _report_refused(setting: Setting, refused: RefusedPlanRecord) -> int:
    """Print why a plan was refused, and whether the policy makes a valid one now; return 0 if so, else 1."""
    print(f"a plan of {setting.policy} was refused at {refused.snapshot.now:.6f} s: {refused.error}")
    error = plan_again(setting, refused)
    print(
        "this version makes a valid plan" if error is None else f"this version's plan is refused too: {error}"
    )
    return int(error is not None)


def _described(difference: PlanDifference) -> str:
    event = difference.event
    heading = (
        f"plan {difference.number:,} differs, on {type(event).__name__} at {event.time:.6f} s; "
        "all before it are identical"
    )
    recorded, replayed = _pretty(difference.recorded), _pretty(difference.replayed)
    both = difflib.unified_diff(recorded, replayed, "recorded", "replayed", n=len(recorded), lineterm="")
    return "\n".join((heading, *both))


def _pretty(line: PlanRecord | None) -> list[str]:
    if line is None:
        return ["no plan"]
    return msgspec.json.format(bytes(line.plan), indent=2).decode().splitlines()
