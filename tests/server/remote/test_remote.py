"""Several who answer clients of one engine, each over a channel of its own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from socket import socketpair

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raw_http import until
from scripted_engine import ScriptedEngine

from loong.core.cached_tokens import CachedTokens
from loong.core.errors import ClusterError, EngineStoppedError, InvalidRequestError
from loong.core.events import ProducedToken
from loong.core.prompt_logprobs import PromptLogprobs
from loong.core.request import SLO, FinishReason, NewRequest, SamplingParams
from loong.engine.client import Answered, EngineLimits, PutToken, RequestLoad
from loong.messages.stream import Stream
from loong.messages.wire import WireError, encode
from loong.server.admission import Admission
from loong.server.api.errors import ApiError
from loong.server.local_engine import LocalEngineClient
from loong.server.openai.token_stream import TokenStream
from loong.server.remote import connection
from loong.server.remote.channel import RemoteChannel
from loong.server.remote.client import RemoteEngineClient
from loong.server.remote.connection import ApiConnection
from loong.server.remote.messages import (
    Abort,
    Admit,
    Admitted,
    Failed,
    FoundCached,
    Leave,
    Listening,
    NewLimits,
    NoteParent,
    Ping,
    Pong,
    Produced,
    Refused,
    Scored,
    StopListening,
    Submit,
    decode_call,
    decode_notice,
)
from loong.server.settings import ServerSettings

REQUEST = NewRequest(
    "cmpl-1",
    (1, 2, 3),
    SamplingParams(max_tokens=5, stop_token_ids=(7,), logit_bias=((3, -1.5),), bad_words=((3, 4),)),
    slo=SLO(1.0, 0.5),
    user="key 1",
    num_choices=2,
    priority=-3,
    num_prompt_logprobs=4,
)
CALLS = (
    Listening(),
    Pong(),
    Admit(3, RequestLoad({"a": 5, "b": 6}, 2, 1)),
    Leave(3),
    Submit(REQUEST),
    Abort("a", FinishReason.STOP),
    NoteParent("a", "00-1-2-01"),
)
NOTICES = (
    Admitted(3),
    Refused(3, 503, "the queue is full", "queue_full", None, {"Retry-After": "1"}),
    Produced((ProducedToken("a", 5), ProducedToken("b", 6, FinishReason.STOP))),
    Scored("a", PromptLogprobs("a", range(1, 3), [-0.5, -1.0], [1, 9], [[5, 6]], [[-0.5, -0.25]])),
    FoundCached(CachedTokens("a", 7)),
    Failed(("a", "a-1"), "instance 1 was lost"),
    StopListening(),
    Failed(("a",), "it needs KV for 130 tokens", is_invalid=True),
    Ping(),
    NewLimits(EngineLimits(100, 200, 300)),
)


@dataclass
class Office:
    """One engine, and those who answer its clients."""

    engine: ScriptedEngine
    admission: Admission
    clients: list[RemoteEngineClient]
    connections: list[ApiConnection]


@asynccontextmanager
async def office(engine: ScriptedEngine, number: int = 2, **settings: object) -> AsyncIterator[Office]:
    admission = Admission(ServerSettings("tiny", **settings))  # type: ignore[arg-type]
    local = LocalEngineClient(engine, admission)
    made = Office(engine, admission, [], [])
    async with AsyncExitStack() as stack:
        for _ in range(number):
            there, client = ApiConnection(local, admission), RemoteEngineClient(engine.limits)
            ours, theirs = socketpair()
            await there.open(ours)
            await client.open(theirs)
            made.clients.append(client)
            made.connections.append(there)
            stack.push_async_callback(there.has_ended.wait)
            stack.push_async_callback(client.ended.wait)
            stack.callback(client.close)
        yield made


def request(request_id: str, **params: object) -> NewRequest:
    return NewRequest(request_id, (1, 2, 3), SamplingParams(**params))  # type: ignore[arg-type]


async def tokens_of(client: RemoteEngineClient, asked: NewRequest) -> list[ProducedToken]:
    async with client.admit(RequestLoad({asked.request_id: len(asked.prompt_token_ids)}, asked.num_choices)):
        with TokenStream(client, asked) as tokens:
            return [token async for token in tokens]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: type(call).__name__)
def test_a_call_arrives_as_it_was_made(call: object) -> None:
    came = decode_call(encode(call))
    if isinstance(came, Submit):
        assert came.request.prompt_token_ids == [1, 2, 3]  # sequences arrive as lists
        assert encode(came) == encode(call)
    else:
        assert came == call


@pytest.mark.parametrize("notice", NOTICES, ids=lambda notice: type(notice).__name__)
def test_notices_arrive_as_they_were_reported(notice: object) -> None:
    assert decode_notice(encode(notice)) == notice
    with pytest.raises(WireError):
        decode_call(encode(notice))


@given(st.lists(st.binary(max_size=40), max_size=8), st.lists(st.integers(1, 30), min_size=1))
def test_frames_are_whole_however_their_bytes_arrive(frames: list[bytes], cuts: list[int]) -> None:
    taken: list[bytes] = []
    channel = RemoteChannel(taken.append, lambda: None)
    data = b"".join(len(frame).to_bytes(4, "little") + frame for frame in frames)
    number = 0
    while data:
        size = cuts[number % len(cuts)]
        channel.data_received(data[:size])
        data, number = data[size:], number + 1
    assert taken == frames


async def test_tokens_of_all_processes_come_to_those_who_asked() -> None:
    async with office(ScriptedEngine()) as made:
        asked = [request(f"r{i}", max_tokens=3 + i) for i in range(10)]
        reported = await asyncio.gather(*(tokens_of(made.clients[i % 2], r) for i, r in enumerate(asked)))
        assert [len(tokens) for tokens in reported] == [3 + i for i in range(10)]
        assert all(token.request_id == f"r{i}" for i, tokens in enumerate(reported) for token in tokens)
        await until(lambda: made.admission.num_in_flight == 0)


async def test_the_queue_is_one_for_all_processes() -> None:
    engine = ScriptedEngine(pause_at=0)
    async with office(engine, max_waiting_requests=1, retry_after=7) as made:
        first, second = made.clients
        waiting = asyncio.create_task(tokens_of(first, request("a", max_tokens=2)))
        await engine.paused.wait()
        with pytest.raises(ApiError, match="1 requests are waiting") as refused:
            await tokens_of(second, request("b"))
        assert (refused.value.status, refused.value.headers) == (503, {"Retry-After": "7"})
        engine.resume.set()
        assert len(await waiting) == 2
        assert len(await tokens_of(second, request("c", max_tokens=2))) == 2


async def test_a_key_has_one_limit_at_all_processes() -> None:
    async with office(ScriptedEngine(), max_requests_per_key=3) as made:
        first, second = made.clients
        async with first.admit(RequestLoad({"a": 1}, 2, key=0)):
            with pytest.raises(ApiError, match="2 answers in flight, and 3 may be"):
                async with second.admit(RequestLoad({"b": 1}, 2, key=0)):
                    pass
            async with (
                second.admit(RequestLoad({"b": 1}, 1, key=0)),
                second.admit(RequestLoad({"c": 1}, 3, key=1)),
            ):
                assert made.admission.num_in_flight == 6


async def test_a_process_that_dies_takes_only_its_own_requests_along() -> None:
    engine = ScriptedEngine(pause_at=1)
    async with office(engine) as made:
        doomed, other = made.clients
        cut = asyncio.create_task(tokens_of(doomed, request("a", max_tokens=4)))
        kept = asyncio.create_task(tokens_of(other, request("b", max_tokens=4)))
        await until(lambda: len(engine.num_produced) == 2)
        doomed.close()
        await until(lambda: "a" in engine.aborted and made.admission.num_in_flight == 1)
        engine.resume.set()
        assert len(await kept) == 4
        with pytest.raises(EngineStoppedError):
            await cut


async def test_an_engine_that_dies_ends_every_stream_and_admits_no_more() -> None:
    engine = ScriptedEngine(pause_at=1)
    async with office(engine, 1) as made:
        (client,) = made.clients
        cut = asyncio.create_task(tokens_of(client, request("a")))
        await engine.paused.wait()
        made.connections[0].close()
        with pytest.raises(EngineStoppedError):
            await cut
        with pytest.raises(EngineStoppedError):
            await tokens_of(client, request("b"))
        put: list[object] = []
        client.submit(request("c"), put.append)
        assert [type(error) for error in put] == [EngineStoppedError]


async def test_an_engine_that_fails_says_why_to_all() -> None:
    async with office(ScriptedEngine(fail_at=1)) as made:
        reported = await asyncio.gather(
            *(tokens_of(client, request(str(i))) for i, client in enumerate(made.clients)),
            return_exceptions=True,
        )
        assert [str(error) for error in reported] == ["instance 3 is lost"] * 2


async def test_an_engine_that_has_stopped_refuses_here_what_it_refuses_there() -> None:
    async with office(ScriptedEngine(), 1) as made:
        made.admission.stop()
        with pytest.raises(ApiError) as refused:
            await tokens_of(made.clients[0], request("a"))
        assert (refused.value.status, refused.value.code) == (503, "engine_stopped")


async def test_an_engine_that_fails_has_reported_its_tokens_before() -> None:
    class Failing(ScriptedEngine):
        def submit(self, request: NewRequest, put: PutToken) -> None:
            put(ProducedToken(request.request_id, 5))
            put(ClusterError("instance 3 is lost"))

    async with office(Failing(), 1) as made:
        put: Stream[Answered] = Stream()
        made.clients[0].submit(request("a"), put.put)
        assert await put.get() == ProducedToken("a", 5)
        assert str(await put.get()) == "instance 3 is lost"


async def test_a_request_that_is_at_fault_is_so_at_the_client() -> None:
    failure = InvalidRequestError("it needs KV for 130 tokens")
    async with office(ScriptedEngine(fail_at=0, failure=failure), 1) as made:
        with pytest.raises(InvalidRequestError, match="KV for 130 tokens"):
            await tokens_of(made.clients[0], request("a"))


async def test_limits_are_reported_at_once_and_to_processes_that_start_later() -> None:
    engine = ScriptedEngine()
    async with office(engine, 1) as made:
        (client,), (there,) = made.clients, made.connections
        engine.limits = replace(engine.limits, max_request_kv=50)
        there.report_limits()
        await until(lambda: client.limits == engine.limits)
        late = ApiConnection(LocalEngineClient(engine, made.admission), made.admission)
        newcomer = RemoteEngineClient(EngineLimits(1, 1, 1))
        ours, theirs = socketpair()
        await late.open(ours)
        await newcomer.open(theirs)
        await until(lambda: newcomer.limits == engine.limits)
        newcomer.close()
        await late.has_ended.wait()


async def test_who_gives_up_while_asking_is_counted_no_more() -> None:
    async with office(ScriptedEngine(), 1) as made:
        (client,) = made.clients

        async def ask() -> None:
            async with client.admit(RequestLoad({"a": 1})):
                await asyncio.Event().wait()

        for _ in range(3):
            pending = asyncio.create_task(ask())
            await asyncio.sleep(0)  # the question is on its way
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
        async with client.admit(RequestLoad({"b": 1})):
            assert made.admission.num_in_flight == 1


async def test_a_process_that_takes_in_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_UNSENT_BYTES", 2**16)
    engine = ScriptedEngine()
    admission = Admission(ServerSettings("tiny"))
    stuck = ApiConnection(LocalEngineClient(engine, admission), admission)
    ours, theirs = socketpair()
    with theirs:
        await stuck.open(ours)
        frame = encode(Submit(request("a", max_tokens=10**6)))
        theirs.sendall(len(frame).to_bytes(4, "little") + frame)
        await stuck.has_ended.wait()
    assert "a" in engine.aborted


async def test_a_process_that_answers_nothing_any_more_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "ASK_SECONDS", 0.001)
    admission = Admission(ServerSettings("tiny"))
    silent = ApiConnection(LocalEngineClient(ScriptedEngine(), admission), admission)
    ours, theirs = socketpair()
    with theirs:
        await silent.open(ours)
        await silent.watch()
        await silent.has_ended.wait()


async def test_a_process_that_answers_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "ASK_SECONDS", 0.0001)
    async with office(ScriptedEngine(), 1) as made:
        watching = asyncio.create_task(made.connections[0].watch())
        for number in range(30):
            assert len(await tokens_of(made.clients[0], request(str(number), max_tokens=5))) == 5
        assert not watching.done()
    await watching
