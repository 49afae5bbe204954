"""The engine's ends of the sockets between it and its workers."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import suppress

import zmq

from loong.executor.endpoints import Endpoints, WorkerId
from loong.messages.secure_sockets import ConnectionWatch, connect_securely, is_wildcard, listen_securely
from loong.messages.stray_frames import StrayFrames
from loong.messages.wire import MAX_FRAME_BYTES, Command, address, encode

LINGER_MS = 1000  # for queued messages to leave a socket that is closed


class WorkerSockets:
    """One socket for each worker's commands, and one for all reports; with other hosts, one for theirs.

    `remote_reports` is its endpoint.
    """

    def __init__(self, endpoints: Endpoints, strays: StrayFrames) -> None:
        """`strays` counts what other processes send or try."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._reports = [self._new_reports()]
        self._reports[0].bind(address(endpoints.reports))
        self.remote_reports = ""
        self._secret = ""
        self._watches: list[ConnectionWatch] = []
        if (remote := endpoints.remote_reports) is not None:
            reports, self._secret = self._new_reports(), remote.secret
            self._watches.append(ConnectionWatch(reports, strays))
            self.remote_reports = listen_securely(reports, remote.endpoint, remote.secret)
            self._reports.append(reports)
        self._commands: dict[WorkerId, zmq.Socket[bytes]] = {}
        self.add(endpoints.commands)

    def _new_reports(self) -> "zmq.Socket[bytes]":
        socket = self._context.socket(zmq.PULL)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        return socket

    def _connect(self, endpoint: str) -> "zmq.Socket[bytes]":
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        if endpoint.startswith("tcp:"):
            connect_securely(socket, endpoint, self._secret)
        else:
            socket.connect(address(endpoint))
        return socket

    def add(self, commands: Mapping[WorkerId, str]) -> None:
        """Connect to workers that start, by the endpoints of their commands that have a port."""
        self._commands.update(
            {worker: self._connect(where) for worker, where in commands.items() if not is_wildcard(where)}
        )

    def connect(self, worker_id: WorkerId, endpoint: str) -> None:
        """Connect to a worker of another host, which takes commands at `endpoint` from now on."""
        if endpoint and worker_id not in self._commands:
            with suppress(zmq.ZMQError):  # no endpoint: another process of this user sent the report
                self._commands[worker_id] = self._connect(endpoint)

    def drop(self, workers: Iterable[WorkerId], linger_ms: int = 0) -> None:
        """Close the sockets of workers that are gone. What is queued for them has this time to leave."""
        for worker_id in workers:
            if (socket := self._commands.pop(worker_id, None)) is not None:
                socket.close(linger_ms)

    def send(self, workers: Iterable[WorkerId], command: Command) -> None:
        """Queue a command for each of these workers; one that has yet to connect has no use for it."""
        frame = encode(command)
        for worker_id in workers:
            if (socket := self._commands.get(worker_id)) is not None:
                with suppress(zmq.Again):  # the connection broke, which ends the worker
                    socket.send(frame, zmq.NOBLOCK)

    def frames(self) -> Iterator[bytes]:
        """Yield the frames that have come, to the last one. Frames that were sent together come together."""
        for reports in self._reports:
            while reports.poll(0):  # an error at the end would take three times as long
                yield reports.recv(zmq.NOBLOCK)

    async def arrivals(self) -> AsyncGenerator[None]:
        """Yield once, and again whenever frames may have come since all were read.

        It is to be closed before the sockets are.
        """
        readable, loop = asyncio.Event(), asyncio.get_running_loop()
        descriptors = [reports.fileno() for reports in self._reports]
        for descriptor in descriptors:
            loop.add_reader(descriptor, readable.set)
        try:
            while True:
                readable.clear()
                yield
                await readable.wait()
        finally:
            for descriptor in descriptors:
                loop.remove_reader(descriptor)

    def close(self) -> None:
        """Close all sockets; queued commands have a second to leave."""
        for socket in self._commands.values():
            socket.close()
        for watch in self._watches:
            watch.close()
        for reports in self._reports:
            reports.close(linger=0)
        self._context.destroy(linger=1000)
