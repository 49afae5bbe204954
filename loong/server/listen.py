"""The socket that the application listens on."""

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from loong.core.errors import ConfigError


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
            reason = "the port is in use" if is_taken else error
            raise ConfigError(f"cannot listen on --host {host} --port {port}: {reason}") from error
        yield listener


async def serve(
    app: web.Application, listener: socket.socket, *, shutdown_timeout: float = 10.0
) -> web.AppRunner:
    """Listen on a bound socket, and return the runner: `addresses` tells its port, `cleanup` ends it.

    A client that leaves cancels its handler, and so aborts its request. `cleanup` waits `shutdown_timeout`
    seconds for the requests in flight.
    """
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_timeout)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    return runner
