"""The engine's ends of the sockets between it and its workers."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping

import zmq

from loong.executor.endpoints import Endpoints, WorkerId
from loong.wire import MAX_FRAME_BYTES, Command, address, encode

LINGER_MS = 1000  # for queued messages to leave a socket that is closed


class WorkerSockets:
    """One socket for each worker's commands, and one for all reports."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._reports = self._context.socket(zmq.PULL)
        self._reports.setsockopt(zmq.RCVHWM, 0)
        self._reports.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._reports.bind(address(endpoints.reports))
        self._commands = {worker_id: self._connect(where) for worker_id, where in endpoints.commands.items()}

    def _connect(self, endpoint: str) -> "zmq.Socket[bytes]":
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.connect(address(endpoint))
        return socket

    def add(self, commands: Mapping[WorkerId, str]) -> None:
        """Connect to workers that were started later, by the endpoints of their commands."""
        self._commands.update({worker_id: self._connect(where) for worker_id, where in commands.items()})

    def drop(self, workers: Iterable[WorkerId], linger_ms: int = 0) -> None:
        """Close the sockets of workers that are gone. What is queued for them has this time to leave."""
        for worker_id in workers:
            self._commands.pop(worker_id).close(linger_ms)

    def send(self, workers: Iterable[WorkerId], command: Command) -> None:
        """Queue a command for each of these workers."""
        frame = encode(command)
        for worker_id in workers:
            self._commands[worker_id].send(frame)

    def frames(self) -> Iterator[bytes]:
        """Yield the frames that have come, to the last one. Frames that were sent together come together."""
        while self._reports.poll(0):  # an error at the end would take three times as long
            yield self._reports.recv(zmq.NOBLOCK)

    async def arrivals(self) -> AsyncIterator[None]:
        """Yield once, and again whenever frames may have come since all were read."""
        readable, loop = asyncio.Event(), asyncio.get_running_loop()
        descriptor = self._reports.fileno()
        loop.add_reader(descriptor, readable.set)
        try:
            while True:
                readable.clear()
                yield
                await readable.wait()
        finally:
            loop.remove_reader(descriptor)

    def close(self) -> None:
        """Close all sockets; queued commands have a second to leave."""
        for socket in self._commands.values():
            socket.close()
        self._reports.close(linger=0)
        self._context.destroy(linger=1000)
