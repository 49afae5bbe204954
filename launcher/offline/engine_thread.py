"""An engine that runs in a thread of this process, and the server's parts that make requests for it."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

import uvloop

from loong.core.errors import EngineStoppedError
from loong.core.events import Drained
from loong.launcher.cluster.worker_fork_server import worker_fork_server
from loong.launcher.serve.build import Served, build
from loong.launcher.serve.config import ServeConfig
from loong.launcher.serve.prepare import prepare, tried_tokenizer
from loong.server.app import create_app
from loong.server.context import SERVER, Server
from loong.server.text.tokenizer import Tokenizer

T = TypeVar("T")


class EngineThread:
    """A running engine. Its event loop has a thread of its own, so it runs under any program."""

    def __init__(self, config: ServeConfig) -> None:
        """Start the workers, and return when they are ready. Raises what `build` raises."""
        self._config = config
        self._ready: Future[Server] = Future()
        self._stop = asyncio.Event()
        self._thread = Thread(target=self._run, name="loong engine", daemon=True)
        self._thread.start()
        try:
            self.server = self._ready.result()
        except BaseException:
            self.stop()
            raise

    def call(self, work: Callable[[], Coroutine[None, None, T]]) -> "Future[T]":
        """Run a coroutine in the engine's loop. Raises `EngineStoppedError` if that has ended."""
        if not self._thread.is_alive() or self._stop.is_set():
            raise EngineStoppedError
        return asyncio.run_coroutine_threadsafe(work(), self._loop)

    def stop(self) -> None:
        """End the engine and its workers. Further calls do nothing."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            self._loop = runner.get_loop()
            try:
                runner.run(self._serve())
            except BaseException as error:  # noqa: BLE001 - the thread that waits for the start raises it
                if not self._ready.done():
                    self._ready.set_exception(error)

    async def _serve(self) -> None:
        prepared, tokenizer = prepare(self._config), await tried_tokenizer(self._config)
        fork_server = worker_fork_server() if self._config.cluster.hosts == "local" else None
        try:
            async with build(prepared, fork_server) as served:
                await self._until_stopped(served, tokenizer)
        finally:
            if fork_server is not None:
                fork_server.close()

    async def _until_stopped(self, served: Served, tokenizer: Tokenizer) -> None:
        running = asyncio.create_task(served.engine.run())
        app = create_app(served.engine, tokenizer, self._config.server)
        app.freeze()
        self._ready.set_result(app[SERVER])
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([running, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            served.executor.post(Drained())
            await asyncio.wait([running])
            await app.cleanup()
