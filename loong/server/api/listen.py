"""The listening sockets of the application."""

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
OTHER_DESCRIPTORS = 256  # of a server: logs, workers, files, refused connections
LINGERING_SECONDS = 2.0  # for a refused client to send the rest of its body


@contextmanager
def bound_socket(host: str, port: int) -> Iterator[socket.socket]:
    """Yield a socket that owns its port (0: any free one) before slow work begins. It refuses until `serve`.

    Raises `ConfigError` if the address cannot be used.
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
def sibling_sockets(listener: socket.socket, number: int) -> Iterator[list[socket.socket]]:
    """Yield `number` more sockets on the port of a bound one. The system spreads connections among them."""
    listener.setsockopt(
        socket.SOL_SOCKET, socket.SO_REUSEPORT, 1
    )  # only now, after the bind has shown that the port was free
    with ExitStack() as stack:
        others = [stack.enter_context(socket.socket(listener.family)) for _ in range(number)]
        for other in others:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            # As for the first: connections inherit it, so the next server may bind while they linger.
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(listener.getsockname())
        yield others


async def serve(
    app: web.Application, listener: socket.socket, *, shutdown_timeout: float = 10.0
) -> web.AppRunner:
    """Listen on a bound socket. Return the runner: `addresses` has its port, `cleanup` ends it.

    A client that leaves cancels its handler, and so aborts its request. A client that sends no complete
    headers in time, or does not read what is written to it, loses its connection. A client beyond the limit
    of descriptors gets an error. `cleanup` waits `shutdown_timeout` seconds for the requests in flight.
    """
    settings = app[SERVER].settings
    app[IS_LOOPBACK] = is_loopback(listener.getsockname()[0])
    # Connections inherit it. The kernel drops those whose peers read nothing.
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
    """Refuse new connections. Open connections stay."""
    for site in list(runner.sites):
        await site.stop()


def _with_readable_expect(handle: Handler) -> Handler:
    """Return the handler with a check for Expect headers that aiohttp cannot repeat in its error."""

    async def check_and_handle(request: web.BaseRequest) -> web.StreamResponse:
        if not request.headers.get("Expect", "").isascii():
            headers = {HEADER: new_id()}  # the middleware has not seen it
            raise web.HTTPExpectationFailed(text="the Expect header is not ASCII", headers=headers)
        return await handle(request)

    return check_and_handle


class _HttpLog(logging.LoggerAdapter[logging.Logger]):
    """Keeps errors out of the log that any client can cause in large numbers: invalid HTTP, and leaving."""

    def exception(self, msg: object, *args: object, exc_info: object = True, **_: object) -> None:
        """Log an error with its traceback, unless the client is the cause."""
        if isinstance(exc_info, HttpProcessingError):
            self.debug("a client sent what is no request: %s", exc_info.message)
        elif isinstance(exc_info, ConnectionError):
            self.debug("a client left before it was answered: %s", exc_info)
        else:
            self.error(msg, *args, exc_info=exc_info)  # type: ignore[arg-type]  # as it came


def allow_many_connections() -> None:
    """Raise the limit of descriptors, one for each connection, as far as allowed, and log it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    logger.info("room for %d connections: the limit of descriptors is %d", _room_for_connections(), hard)


def _room_for_connections() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, soft - OTHER_DESCRIPTORS)
