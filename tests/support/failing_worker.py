"""A worker process that fails at a point of its work that a test names: it is killed, or raises an error.

A test arms an instance by a file `<instance id>` in the folder of the variable `ARMED`. The first call at the
point removes the file and fails. A file `token` names one that kills each worker that computes it. Without a
file, the process is a worker like any other.
"""

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path

from loong.core.instructions import MoveKV
from loong.core.plan import QueryBlock
from loong.core.request import TokenId
from loong.messages.wire import Heartbeat
from loong.worker import process
from loong.worker.config import WorkerConfig
from loong.worker.kv.pool import KVPool
from loong.worker.steps.step_inputs import Progress
from loong.worker.transfer import SegmentMover

ARMED = "LOONG_TEST_ARMED"
TOKEN = "token"
MODULE = __name__
MESSAGE = "an error that the test injected"


def arm(folder: Path, instance_id: int, point: str, *, raises: bool = False) -> None:
    """Let an instance fail when it comes to a point: `layer 0`, `gather`, `scatter`, `moved` or `beat`."""
    written = folder / "new"
    written.write_text(f"{'raise' if raises else 'kill'} {point}")
    written.rename(folder / str(instance_id))


def variables(armed: Path) -> dict[str, str]:
    """Return the variables of processes that are to find this module, and look for files in `armed`."""
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {ARMED: str(armed), "PYTHONPATH": os.pathsep.join(paths)}


def arm_token(folder: Path, token_id: TokenId) -> None:
    """Let a token kill every worker that computes it, until the file is removed."""
    (folder / TOKEN).write_text(str(token_id))


def main() -> None:
    """Run the worker whose config is the first line of standard input."""
    armed = Path(os.environ[ARMED])
    make_config: Callable[[bytes, type[WorkerConfig]], WorkerConfig] = vars(process)["config_of"]

    def config_of(line: bytes, kind: type[WorkerConfig]) -> WorkerConfig:
        config = make_config(line, kind)
        _install(armed / str(config.instance_id))
        return config

    vars(process)["config_of"] = config_of
    process.main()


def _install(order: Path) -> None:
    """Let the calls at all points look for an order."""

    def come_to(point: str) -> None:
        try:
            how, _, ordered = order.read_text().partition(" ")
            if ordered != point:
                return
            order.unlink()
        except FileNotFoundError:  # there is none, or another thread has taken it
            return
        if how == "raise":
            raise RuntimeError(MESSAGE)
        os.kill(os.getpid(), signal.SIGKILL)

    _before(KVPool, "layer", lambda layer: come_to(f"layer {layer}"))
    _before(KVPool, "gather", lambda *_: come_to("gather"))
    _before(KVPool, "scatter", lambda *_: come_to("scatter"))
    _before(process.Reports, "send", lambda *sent: come_to("beat") if _is_heartbeat(*sent) else None)
    move = SegmentMover.move

    def move_and_come(mover: SegmentMover, command: MoveKV) -> bool:
        is_committed = move(mover, command)
        come_to("moved")
        return is_committed

    setattr(SegmentMover, "move", move_and_come)  # noqa: B010  mypy allows no assignment to a method
    token_ids = Progress.token_ids

    def fatal_token_ids(progress: Progress, block: QueryBlock) -> Sequence[TokenId]:
        found = token_ids(progress, block)
        with suppress(FileNotFoundError):
            if int((order.parent / TOKEN).read_text()) in found:
                os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(Progress, "token_ids", fatal_token_ids)  # noqa: B010  as above


def _is_heartbeat(*reports: object) -> bool:
    return any(isinstance(report, Heartbeat) for report in reports)


def _before(kind: type, name: str, look: Callable[..., None]) -> None:
    call = getattr(kind, name)

    @wraps(call)
    def looking(self: object, *args: object) -> object:
        look(*args)
        return call(self, *args)

    setattr(kind, name, looking)
