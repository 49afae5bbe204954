"""A server with several engines, each in a process of its own, from its start to its last request."""

import asyncio
import gc
import logging
import signal
from contextlib import nullcontext
from functools import partial
from socket import socket

import uvloop

from loong.launcher.cluster.ray_cluster import shared_ray_cluster
from loong.launcher.cluster.run_directory import run_directory
from loong.launcher.serve.banner import log_banner, log_missing_grammars
from loong.launcher.serve.chosen_front import front_of_several
from loong.launcher.serve.config import ServeConfig
from loong.launcher.serve.engine_processes import EngineProcesses
from loong.launcher.serve.lending import LendingSupervisor
from loong.launcher.serve.prepare import prepare, tried_tokenizer
from loong.launcher.serve.serving import FORCED_EXIT_CODE, drain, until_over
from loong.launcher.serve.stop_signals import StopSignals
from loong.processes.child_processes import signal_children
from loong.processes.gc_tuning import tune_gc
from loong.processes.stacks import stacks_on_request
from loong.server.api.listen import allow_many_connections
from loong.server.engines.app import several_engines
from loong.server.engines.router import EngineRouter
from loong.server.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_REMEMBERED = 2**22  # tokens of the prefixes of an engine, whose blocks take 25 MB


def serve_engines_until_stopped(config: ServeConfig, listener: socket) -> int:
    """Serve as `serve_until_stopped` does, with `num_engines`. Returns 1 if all of them have failed."""
    try:
        return uvloop.run(_serve(config, listener))
    except asyncio.CancelledError:
        return FORCED_EXIT_CODE


async def _serve(config: ServeConfig, listener: socket) -> int:
    with (
        stacks_on_request("the server's process", partial(signal_children, signal.SIGUSR1)),
        run_directory() as directory,
        nullcontext() if config.cluster.hosts == "local" else shared_ray_cluster(),
    ):
        configs = [config.of_engine(engine_id) for engine_id in range(config.num_engines)]
        limits, tokenizer = prepare(configs[0]).limits, await tried_tokenizer(config)
        allow_many_connections()
        signals = StopSignals()
        log_missing_grammars()
        router = EngineRouter(limits, _remembered(configs[0]))
        engines = EngineProcesses(configs, limits, router, directory.path)
        if config.lends:
            engines.lending = LendingSupervisor(directory.path, config.log_format)
        try:
            await engines.start()
            gc.freeze()  # as in an engine's process
            tune_gc()
            log_banner(config, limits, listener.getsockname()[1])
            code = await _run(config, engines, router, tokenizer, listener, signals)
        finally:
            await engines.stop()
        logger.info("stopped")
        return code


async def _run(
    config: ServeConfig,
    engines: EngineProcesses,
    router: EngineRouter,
    tokenizer: Tokenizer,
    listener: socket,
    signals: StopSignals,
) -> int:
    """Watch the engines and answer clients until a signal or a failure. Return the exit code."""
    several = several_engines(engines, router, config.server, allows_faults=config.allows_faults)
    engines.when_lost = several.metrics.end
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(_watch(engines, failed))
    signals.num_heeded = 1
    try:
        async with front_of_several(config, several, tokenizer, listener, failed.set_exception) as front:
            signals.num_heeded = 2
            router.report_limit = front.report_limits
            front.report_limits()
            running.add_done_callback(lambda _: front.admission.stop())
            await until_over(running, signals)
            code = await drain(config, front, signals)
    finally:
        has_failed = running.done()
        running.cancel()
        await asyncio.wait([running])
    return 1 if has_failed else code


async def _watch(engines: EngineProcesses, failed: asyncio.Future[None]) -> None:
    """Watch the engines until all have failed, or an API process has; raise the error."""
    await asyncio.gather(engines.watch(), failed)


def _remembered(config: ServeConfig) -> int:
    """Return how many tokens of prefixes an engine can have cached, up to a bound."""
    cluster = config.cluster
    capacity = cluster.num_instances * (cluster.kv_capacity + cluster.host_kv_capacity)
    return min(MAX_REMEMBERED, capacity) if config.keeps_prefixes else 0
