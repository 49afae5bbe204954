"""Measures what a token costs between one of several engines and the server's process.

500 streams get a token at every tick from engines that cost nothing. `direct`: the engine is in the server's
process, as without --num-engines. `channel`: each token crosses a channel, as to an API process. `router`: it
also passes the router, which could let its request go on elsewhere. Both ends are in this process.
`route` is the choice of an engine of two for a prompt, by its length. The unit is processor time: the least
of five rounds, since others may use the cores. The ceiling is the time of `direct`.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from socket import socketpair

import uvloop

sys.path.append(str(Path(__file__).parents[1] / "support"))

from result import print_result, script_parser

from loong.core.events import ProducedToken
from loong.core.request import FinishReason, NewRequest, RequestId, SamplingParams
from loong.engine.client import Answered, EngineLimits, PutToken, TokenEngine
from loong.server.admission import Admission
from loong.server.engines.router import EngineRouter
from loong.server.local_engine import LocalEngineClient
from loong.server.remote.client import RemoteEngineClient
from loong.server.remote.connection import ApiConnection
from loong.server.settings import ServerSettings

NUM_STREAMS, NUM_TICKS, NUM_ROUNDS = 500, 200, 5
PROMPTS = (1_000, 10_000, 100_000, 1_000_000)  # tokens
LIMITS = EngineLimits(2**21, 2**21, 2**17)
SETTINGS = ServerSettings("tiny", max_waiting_tokens=2**30)


class TickingEngine:
    """An engine that gives each stream a token at a tick."""

    limits = LIMITS

    def __init__(self) -> None:
        self._streams: dict[RequestId, PutToken] = {}

    @property
    def num_streams(self) -> int:
        """Return the number of streams that have begun."""
        return len(self._streams)

    def submit(self, request: NewRequest, put: PutToken) -> None:
        """Begin a stream."""
        self._streams[request.request_id] = put

    def abort(self, request_id: RequestId, _reason: FinishReason = FinishReason.ABORT) -> None:
        """End a stream."""
        self._streams.pop(request_id, None)

    def tick(self, token_id: int) -> None:
        """Give all streams a token."""
        for request_id, put in self._streams.items():
            put(ProducedToken(request_id, token_id))


async def seconds_of_a_token(engine: TickingEngine, client: TokenEngine) -> float:
    """Return the processor time of a token from the engine to who asked for it."""
    num_received = 0

    def put(_answered: Answered) -> None:
        nonlocal num_received
        num_received += 1

    for number in range(NUM_STREAMS):
        client.submit(NewRequest(f"r{number}", (1, 2, 3), SamplingParams(max_tokens=10**6)), put)
    while engine.num_streams < NUM_STREAMS:  # noqa: ASYNC110 - a poll
        await asyncio.sleep(0)
    start = time.process_time()
    for token_id in range(NUM_TICKS):
        engine.tick(token_id)
        while num_received < NUM_STREAMS * (token_id + 1):  # noqa: ASYNC110 - a poll
            await asyncio.sleep(0)
    return (time.process_time() - start) / NUM_STREAMS / NUM_TICKS


async def channel_to(engine: TickingEngine) -> RemoteEngineClient:
    admission = Admission(SETTINGS)
    connection, client = (
        ApiConnection(LocalEngineClient(engine, admission), admission),
        RemoteEngineClient(LIMITS),
    )
    ours, theirs = socketpair()
    await connection.open(ours)
    await client.open(theirs)
    return client


async def direct() -> float:
    engine = TickingEngine()
    return await seconds_of_a_token(engine, LocalEngineClient(engine, Admission(SETTINGS)))


async def channel() -> float:
    engine = TickingEngine()
    return await seconds_of_a_token(engine, await channel_to(engine))


async def router() -> float:
    engine, routing = TickingEngine(), EngineRouter(LIMITS, 2**22)
    routing.join(0, await channel_to(engine))
    return await seconds_of_a_token(engine, LocalEngineClient(routing, Admission(SETTINGS)))


def seconds_of_a_route(num_tokens: int) -> float:
    """Return the processor time to choose an engine for a prompt, which none of them has seen."""
    routing = EngineRouter(LIMITS, 2**22)
    for engine_id in range(2):
        routing.join(engine_id, LocalEngineClient(TickingEngine(), Admission(SETTINGS)))
    request = NewRequest("a", tuple(range(num_tokens)), SamplingParams())
    start = time.process_time()
    routing.submit(request, lambda _: None)
    return time.process_time() - start


def main() -> None:
    args = script_parser("engine_hop", __doc__).parse_args()
    measured: dict[str, Callable[[], Coroutine[None, None, float]]] = {
        "direct": direct,
        "channel": channel,
        "router": router,
    }
    tokens = {
        name: round(1e6 * min(uvloop.run(way()) for _ in range(NUM_ROUNDS)), 2)
        for name, way in measured.items()
    }
    routes = {
        f"{num_tokens:,}": round(1e3 * min(seconds_of_a_route(num_tokens) for _ in range(NUM_ROUNDS)), 3)
        for num_tokens in PROMPTS
    }
    for name, microseconds in tokens.items():
        print(f"{name:>10}: {microseconds:6.2f} us a token")
    for num_tokens, milliseconds in routes.items():
        print(f"a prompt of {num_tokens:>9} tokens: {milliseconds:8.3f} ms to choose an engine")
    print_result("engine_hop", {"us_of_a_token": tokens, "ms_of_a_route": routes}, save=args.save)


if __name__ == "__main__":
    main()
