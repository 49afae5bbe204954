"""What is done with processes of ours, whatever they are for."""

import asyncio
import logging
from collections.abc import Callable, Coroutine

logger = logging.getLogger(__name__)

_STOP_SECONDS = 5.0


def guarded(work: Coroutine[None, None, None], fail: Callable[[BaseException], None]) -> asyncio.Task[None]:
    """A task whose failure is told to `fail`: nobody else waits for it."""

    def tell(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            fail(error)

    task = asyncio.create_task(work)
    task.add_done_callback(tell)
    return task


def how_it_ended(code: int) -> str:
    """A process's exit code in words."""
    return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"


async def stop(process: asyncio.subprocess.Process) -> None:
    """Let a process that was told to end do so by itself, or else kill it."""
    try:
        async with asyncio.timeout(_STOP_SECONDS):
            await process.wait()
    except TimeoutError:
        logger.warning("process %d did not end within %.0f s; killing it", process.pid, _STOP_SECONDS)
        process.kill()
        await process.wait()
