"""A server with its engine in this process, from its start to its last request."""

import asyncio
import logging
from socket import socket

import uvloop

from loong.core.errors import ClusterError
from loong.core.events import Drained
from loong.core.grammar import FIRST_GRAMMARS
from loong.grammar.availability import is_installed
from loong.launcher.serve.banner import log_banner, log_missing_grammars
from loong.launcher.serve.build import Served, build
from loong.launcher.serve.chosen_front import front_of
from loong.launcher.serve.config import ServeConfig
from loong.launcher.serve.front import Front
from loong.launcher.serve.prepare import prepare, tried_tokenizer
from loong.launcher.serve.state_dump import StateDump
from loong.launcher.serve.status_line import log_status
from loong.launcher.serve.stop_signals import StopSignals
from loong.processes.fork_server import ForkServer
from loong.processes.stacks import stacks_on_request
from loong.server.api.listen import allow_many_connections
from loong.server.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

FAILURE_GRACE_SECONDS = 10.0  # after a failure, so that clients of /health see the reason
FORCED_EXIT_CODE = 130


def serve_until_stopped(config: ServeConfig, listener: socket, fork_server: ForkServer | None) -> int:
    """Serve on a bound socket until SIGINT, SIGTERM or SIGHUP, which drain; a second one forces.

    `fork_server` is a `worker_fork_server` (None: workers are on other hosts). Returns 0 after a drain, 1 if
    the engine failed, 130 if it was forced.
    """
    try:
        return uvloop.run(_serve(config, listener, fork_server))
    except asyncio.CancelledError:
        return FORCED_EXIT_CODE


async def _serve(config: ServeConfig, listener: socket, fork_server: ForkServer | None) -> int:
    dump = StateDump()
    with stacks_on_request("the engine's process", dump.request):
        prepared, tokenizer = prepare(config), await tried_tokenizer(config)
        allow_many_connections()
        signals = StopSignals()
        log_missing_grammars()
        async with build(prepared, fork_server) as served:
            dump.snapshot = served.engine.snapshot
            code = await _run(served, tokenizer, listener, signals)
        logger.info("stopped")
        return code


async def _run(served: Served, tokenizer: Tokenizer, listener: socket, signals: StopSignals) -> int:
    """Run the engine and answer clients until a signal or a failure. Return the exit code."""
    engine, executor, scaling = served.engine, served.executor, served.scaling
    running = asyncio.create_task(engine.run())
    signals.num_heeded = 1  # the first of several API processes takes requests while others start
    async with front_of(served, tokenizer, listener) as front:
        signals.num_heeded = 2
        scaling.report_limit = front.report_limits
        front.report_limits()  # it may have changed while API processes started
        status = asyncio.create_task(log_status(engine))
        try:
            log_banner(served.prepared.config, served.prepared.limits, listener.getsockname()[1])
            if is_installed():
                executor.calls.prepare_first_grammars(FIRST_GRAMMARS)
            running.add_done_callback(lambda _: front.admission.stop())
            await until_over(running, signals)
            code = await drain(served.prepared.config, front, signals)
        finally:
            status.cancel()
            executor.post(Drained())
            await asyncio.wait([running])
    return 1 if running.exception() is not None else code


async def until_over(running: asyncio.Task[None], signals: StopSignals) -> None:
    """Wait for a signal or the failure of what runs, whichever is first."""
    running.add_done_callback(log_failure)
    asked_to_stop = asyncio.create_task(signals.first.wait())
    await asyncio.wait([running, asked_to_stop], return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        logger.error("/health reports it for %.0f s, then the server ends", FAILURE_GRACE_SECONDS)
        await asyncio.wait([asked_to_stop], timeout=FAILURE_GRACE_SECONDS)


async def drain(config: ServeConfig, front: Front, signals: StopSignals) -> int:
    """Refuse new connections and requests, and let open ones finish, for a while.

    The requests left then fail.

    Returns the exit code.
    """
    await front.stop_listening()
    admission, timeout = front.admission, config.drain_timeout
    admission.close()  # connections that are open may send more
    if num_open := admission.num_in_flight:
        logger.info("draining %d request(s) for at most %g s; a second signal ends it", num_open, timeout)
    finished = asyncio.create_task(admission.wait_until_idle())
    forced = asyncio.create_task(signals.second.wait())
    await asyncio.wait([finished, forced], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    if num_open := admission.num_in_flight:
        logger.warning("%d request(s) are cut off", num_open)
        return FORCED_EXIT_CODE if forced.done() else 1
    return 0


def log_failure(running: asyncio.Task[None]) -> None:
    """Log why an engine has failed, if it has."""
    error = None if running.cancelled() else running.exception()
    if isinstance(error, ClusterError):
        logger.error("the engine failed: %s", error)
    elif error is not None:
        logger.error("the engine failed by an internal error:", exc_info=error)
