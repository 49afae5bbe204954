"""Requests and messages that are almost right, and what must hold of the answers to them."""

import asyncio
import json
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from threading import Thread

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from listening import serving_with
from scripted_engine import ScriptedEngine
from wire_samples import COMMANDS, REPORTS

from loong.server.tokenizer import Tokenizer
from loong.wire import WireError, decode_command, decode_report, encode

MAX_TOKENS = 8  # of an answer, so that the time goes into requests
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_BAD_WORDS = (b"Traceback", b"server_error", b"Internal Server Error")

numbers = st.integers(-5, 300) | st.integers(-(2**65), 2**65) | st.floats() | st.booleans()
texts = st.text(max_size=20) | st.sampled_from(
    ["", "a", "<|bos|>", "\x00", "\ud800", "é" * 50, "{{7*7}}", "{% raw"]
)
anything = st.recursive(
    st.none() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=8,
)
token_ids = st.lists(st.integers(-1, 264), max_size=6)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "developer"]), "content": texts | anything},
        optional={"name": texts, "tool_calls": anything, "refusal": anything, "weight": anything},
    ),
    max_size=3,
)
_MEANT: Mapping[str, SearchStrategy[object]] = {
    "prompt": texts | token_ids | st.lists(texts | token_ids, max_size=3),
    "messages": messages,
    "tokens": token_ids,
    "model": st.sampled_from(["tiny", "other"]),
    "max_completion_tokens": st.integers(0, MAX_TOKENS),
    "min_tokens": st.integers(0, 9),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1),
    "top_k": st.integers(-1, 50),
    "min_p": st.floats(0, 1),
    "presence_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.1, 2),
    "logit_bias": st.dictionaries(st.integers(0, 300).map(str), st.floats(-100, 100), max_size=3),
    "n": st.integers(0, 17),
    "seed": st.integers(),
    "stop": texts | st.lists(texts, max_size=3),
    "stop_token_ids": token_ids,
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans()}),
    "logprobs": st.booleans() | st.integers(0, 21),
    "top_logprobs": st.integers(0, 21),
    "echo": st.booleans(),
    "user": texts,
    "chat_template_kwargs": st.dictionaries(texts, anything, max_size=2),
    "response_format": st.sampled_from([{"type": "text"}, {"type": "nonsense"}]) | anything,
    "return_token_ids": st.booleans(),
    "return_token_strs": st.booleans(),
    "add_special_tokens": st.booleans(),
}
_PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/models", "/nothing")


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """The bytes of a request with a body, of which a few may be wrong."""
    names = draw(st.lists(st.sampled_from([*_MEANT]), max_size=6))
    fields = {name: draw(_MEANT[name] if draw(st.integers(0, 9)) else anything) for name in names}
    fields.setdefault("max_tokens", MAX_TOKENS)
    fields |= draw(st.dictionaries(texts, anything, max_size=1)) if not draw(st.integers(0, 9)) else {}
    body = draw(damaged(json.dumps(fields).encode()))
    method = draw(st.sampled_from(["POST", "POST", "POST", "GET", "PUT", "HEAD"]))
    head = (
        f"{method} {draw(st.sampled_from(_PATHS))} HTTP/1.1",
        "Host: localhost",
        "Connection: close",
        _JSON_TYPE if draw(st.integers(0, 9)) else "Content-Type: text/plain; charset=utf-7",
        *draw(st.lists(st.sampled_from(_HEADERS), max_size=2)),
        f"Content-Length: {len(body)}",
    )
    return draw(damaged("\r\n".join((*head, "", "")).encode(errors="surrogateescape"))) + body


_JSON_TYPE = "Content-Type: application/json; charset=utf-8"
_HEADERS = (
    "Content-Type: \udcff",
    "Origin: null",
    "Origin: http://\udcff",
    "Host: \udcff",
    "Sec-Fetch-Site: cross-site",
    "Content-Encoding: gzip",
    "Transfer-Encoding: chunked",
    "Authorization: Bearer \udcff",
    "Expect: 100-continue",
    "Upgrade: websocket",
    "Cookie: a=b",
    "X: " + "a" * 500,
)


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """The same bytes, mostly; else with some of them lost, doubled or changed."""
    found = bytearray(data)
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 1, 2, 5]))):
        begin = draw(st.integers(0, len(found)))
        end = min(len(found), begin + draw(st.integers(0, 4)))
        found[begin:end] = draw(st.binary(max_size=4) | st.just(bytes(found[begin:end]) * 2))
    return bytes(found)


def check_answer(address: tuple[str, int], request: bytes) -> None:
    """Send bytes; fail if any answer blames the server, or none comes and the connection stays."""
    with socket.create_connection(address, timeout=20) as connection:
        answer = b"".join(_answer(connection, request))
    statuses = [int(status) for status in _STATUS.findall(answer)]
    assert all(status < 500 for status in statuses), answer[-2000:]
    assert not any(word in answer for word in _BAD_WORDS), answer[-2000:]


def _answer(connection: socket.socket, request: bytes) -> Iterator[bytes]:
    try:
        connection.sendall(request)
        while data := connection.recv(2**16):
            yield data
    except ConnectionError:  # the server has said what it had to say, and reads no more
        return


def check_frame(frame: bytes) -> None:
    """Decode bytes; fail unless they are refused in our words, or are a message that is understood."""
    for decode in (decode_command, decode_report):
        try:
            message = decode(frame)
        except WireError:
            continue
        assert encode(decode(encode(message))) == encode(message)


@contextmanager
def server_in_a_thread(tokenizer: Tokenizer) -> Iterator[tuple[str, int]]:
    """The address of a server that waits for nobody, over an engine that repeats prompts."""
    with in_a_thread(serving_with(tokenizer)(ScriptedEngine(), idle_timeout=0.05, body_timeout=0.05)) as url:
        host, port = url.removeprefix("http://").split(":")
        yield host, int(port)


@contextmanager
def in_a_thread(serving: AbstractAsyncContextManager[str]) -> Iterator[str]:
    """What a server's context gives, while its event loop runs in a thread."""
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(serving.__aenter__(), loop).result()
        asyncio.run_coroutine_threadsafe(serving.__aexit__(None, None, None), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    """The bytes of a message between engine and workers, of which a few may be wrong."""
    return draw(damaged(encode(draw(st.sampled_from((*COMMANDS, *REPORTS))))) | st.binary(max_size=100))
