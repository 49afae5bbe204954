"""The socket that the application listens on."""

import errno
import logging
import resource
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeAlias

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from loong.core.errors import ConfigError
from loong.server.api.bounded_site import BoundedSite
from loong.server.api.origins import IS_LOOPBACK, is_loopback
from loong.server.api.request_ids import HEADER, new_id
from loong.server.context import SERVER

logger = logging.getLogger(__name__)

Handler: TypeAlias = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

BACKLOG = 4096  # connections that wait to be accepted
OTHER_DESCRIPTORS = 256  # of a server: logs, workers, files, connections that are being refused
LINGERING_SECONDS = 2.0  # a client that is refused before its body is through may send on for this long


@contextmanager
def bound_socket(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that owns its port (0: any) before anything slow begins; it refuses until `serve` listens.

    Raises `ConfigError` if the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except (OSError, OverflowError) as error:
            is_taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            words = error.strerror if isinstance(error, OSError) else None
            reason = "the port is in use" if is_taken else words or error
            raise ConfigError(f"cannot listen on --host {host} --port {port}: {reason}") from error
        yield listener


@contextmanager
def sockets_beside(listener: socket.socket, number: int) -> Iterator[list[socket.socket]]:
    """So many more sockets of a bound one's port; once they listen, the system spreads connections."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # only now: the port was nobody else's
    with ExitStack() as stack:
        others = [stack.enter_context(socket.socket(listener.family)) for _ in range(number)]
        for other in others:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            other.bind(listener.getsockname())
        yield others


async def serve(
    app: web.Application, listener: socket.socket, *, shutdown_timeout: float = 10.0
) -> web.AppRunner:
    """Listen on a bound socket, and return the runner: `addresses` tells its port, `cleanup` ends it.

    A client that leaves cancels its handler, and so aborts its request. One that sends no whole headers in
    time, or takes in nothing of what is written to it, loses its connection. One for whose connection there
    is no descriptor is told so. `cleanup` waits `shutdown_timeout` seconds for the requests in flight.
    """
    settings = app[SERVER].settings
    app[IS_LOOPBACK] = is_loopback(listener.getsockname()[0])
    # Connections inherit it. The kernel drops those whose peers take in nothing, whoever wrote to them last.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(settings.write_timeout * 1000))
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        logger=_HttpLog(logger),
        shutdown_timeout=shutdown_timeout,
        keepalive_timeout=settings.idle_timeout,
        lingering_time=LINGERING_SECONDS,
        auto_decompress=False,  # a small body could become a large one
    )
    await runner.setup()
    assert runner.server is not None  # after `setup`
    runner.server.request_handler = _with_readable_expect(runner.server.request_handler)
    site = BoundedSite(
        runner,
        listener,
        backlog=BACKLOG,
        max_connections=settings.max_connections or _room_for_connections(),
        retry_after=settings.retry_after,
    )
    await site.start()
    return runner


async def stop_listening(runner: web.AppRunner) -> None:
    """Refuse new connections; those that are open go on."""
    for site in list(runner.sites):
        await site.stop()


def _with_readable_expect(handle: Handler) -> Handler:
    """The same, but for a request whose Expect header aiohttp would fail to tell back."""

    async def check_and_handle(request: web.BaseRequest) -> web.StreamResponse:
        if not request.headers.get("Expect", "").isascii():
            headers = {HEADER: new_id()}  # no application has seen it
            raise web.HTTPExpectationFailed(text="the Expect header is not ASCII", headers=headers)
        return await handle(request)

    return check_and_handle


class _HttpLog(logging.LoggerAdapter[logging.Logger]):
    """Keeps out of the log what any client may do by the thousand: send what is no request, or leave."""

    def exception(self, msg: object, *args: object, exc_info: object = True, **_: object) -> None:
        """Log an error with its traceback, if it is not the client's."""
        if isinstance(exc_info, HttpProcessingError):
            self.debug("a client sent what is no request: %s", exc_info.message)
        elif isinstance(exc_info, ConnectionError):
            self.debug("a client left before it was answered: %s", exc_info)
        else:
            self.error(msg, *args, exc_info=exc_info)  # type: ignore[arg-type]  # as it came


def allow_many_connections() -> None:
    """Let this process have as many descriptors as it may: each connection is one. Says how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    logger.info("room for %d connections: the limit of descriptors is %d", _room_for_connections(), hard)


def _room_for_connections() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, soft - OTHER_DESCRIPTORS)
