"""A ZeroMQ publisher of KV events with a thread of its own, and its replay of the last ones."""

import logging
import threading
from collections import deque
from queue import Empty, Full, Queue

import msgspec
import zmq

from loong.core.errors import ConfigError
from loong.observability.kv_events.config import KVEventsConfig
from loong.observability.kv_events.messages import KVEventBatch

POLL_SECONDS = 0.05
CLOSE_SECONDS = 2.0
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
logger = logging.getLogger(__name__)


class KVPublisher:
    """Publishes batches with ascending numbers: topic, number in 8 bytes, batch.

    A client of `replay_endpoint` sends a number; it receives the kept batches from that one on, each with its
    number, and at last the number -1 with nothing.
    """

    def __init__(self, config: KVEventsConfig) -> None:
        """Bind the sockets. Raises `ConfigError` if that is impossible."""
        self._topic = config.topic.encode()
        self._queue: Queue[KVEventBatch | None] = Queue(config.max_queue_size)
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._context = zmq.Context()
        self._publish = self._bound(zmq.PUB, config.endpoint, config.hwm)
        replay = config.replay_endpoint
        self._replay = None if replay is None else self._bound(zmq.ROUTER, replay, config.hwm)
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """Return the address of the publishing socket, with its port."""
        return self._publish.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def replay_endpoint(self) -> str | None:
        """Return that of the socket for replays, if there is one."""
        return None if self._replay is None else self._replay.getsockopt_string(zmq.LAST_ENDPOINT)

    def put(self, batch: KVEventBatch) -> bool:
        """Queue a batch without waiting; return whether there was room."""
        try:
            self._queue.put_nowait(batch)
        except Full:
            return False
        return True

    def close(self) -> None:
        """Publish what is queued, as far as that takes little time, and close the sockets."""
        self._is_closing = True
        self._thread.join(CLOSE_SECONDS)
        for socket in filter(None, (self._publish, self._replay)):
            socket.close(linger=0)
        self._context.term()

    def _bound(self, kind: int, endpoint: str, hwm: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.set_hwm(hwm)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"--kv-events-config: no socket can be bound to {endpoint}: {error}") from None
        return socket

    def _run(self) -> None:
        encoder, number = msgspec.msgpack.Encoder(), 0
        while True:
            if self._replay is not None and self._replay.poll(0):
                self._answer(self._replay)
            try:
                batch = self._queue.get(timeout=POLL_SECONDS)
            except Empty:
                if self._is_closing:
                    return
                continue
            if batch is not None:
                kept = number.to_bytes(8, "big"), encoder.encode(batch)
                self._publish.send_multipart((self._topic, *kept))
                self._kept.append(kept)
                number += 1

    def _answer(self, replay: "zmq.Socket[bytes]") -> None:
        frames = replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            logger.warning("a request for a replay of KV events is no number of 8 bytes; it has no answer")
            return
        client, empty, first = frames
        for kept in self._kept:
            if kept[0] >= first:
                replay.send_multipart((client, empty, *kept))
        replay.send_multipart((client, empty, END_OF_REPLAY, b""))
