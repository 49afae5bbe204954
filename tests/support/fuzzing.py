"""Requests and messages that are almost right, and what must hold of the answers to them, and after them."""

import asyncio
import json
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
from extremes import PLAIN
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from json_places import Json, bodies, resolved
from listening import serving_with
from scripted_engine import ScriptedEngine
from served import Served, served
from wire_samples import COMMANDS, REPORTS

from loong.messages.wire import WireError, decode_command, decode_report, encode
from loong.server.reference.openapi import document
from loong.server.text.tokenizer import Tokenizer

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
_SERVABLE: Mapping[str, SearchStrategy[object]] = {  # values of fields with mostly unservable ones
    "messages": messages,
    "prompt": texts | token_ids | st.lists(texts | token_ids, max_size=3),
    "tokens": token_ids,
    "model": st.sampled_from(["tiny", "loong-tiny", "other"]),
    "max_tokens": st.integers(0, MAX_TOKENS),
    "max_completion_tokens": st.integers(0, MAX_TOKENS),
    "min_tokens": st.integers(0, MAX_TOKENS + 1),
    "logit_bias": st.dictionaries(st.integers(0, 300).map(str), st.floats(-100, 100), max_size=3),
    "stop_token_ids": token_ids,
}


_DOCUMENT = document()


def values_of(schema: Json) -> SearchStrategy[Any]:
    """Return a strategy of values that a schema of the API's document allows, mostly small ones."""
    match schema:
        case {"$ref": reference}:
            return _values_of_reference(reference)
        case {"anyOf": options}:
            return st.one_of(*map(values_of, options))
        case {"enum": values}:
            return st.sampled_from(values)
        case {"const": value}:
            return st.just(value)
        case {"type": "integer", "minimum": low, "maximum": high}:
            return st.integers(low, high) | st.integers(max(low, -2), min(high, 20))
        case {"type": "number", "minimum": low, "maximum": high}:
            return st.floats(low, high)
        case {"type": "array", "items": items}:
            return st.lists(values_of(items), max_size=3)
        case {"type": "object", "properties": fields, **others}:
            values = {name: values_of(field) for name, field in fields.items()}
            required = {name: values.pop(name) for name in others.get("required", ())}
            return st.fixed_dictionaries(required, optional=values)
        case {"type": "object", "additionalProperties": dict(item)}:
            return st.dictionaries(texts, values_of(item), max_size=3)
        case {"type": "boolean"}:
            return st.booleans()
        case {"type": "string"}:
            return texts
        case {"type": "null"}:
            return st.none()
        case _:
            return anything


@cache
def _values_of_reference(reference: str) -> SearchStrategy[Any]:
    return st.deferred(lambda: values_of(resolved({"$ref": reference}, _DOCUMENT)))


_FIELDS: Mapping[str, Mapping[str, SearchStrategy[object]]] = {  # by address
    address: {
        name: _SERVABLE[name] if name in _SERVABLE else values_of(field)
        for name, field in resolved(schema, _DOCUMENT)["properties"].items()
    }
    for address, schema in bodies(_DOCUMENT).items()
}
_PATHS = (*_FIELDS, "/v1/models", "/nothing")
_HEADERS = (
    "Content-Type: text/plain; charset=utf-7",
    "Content-Encoding: gzip",
    "Transfer-Encoding: chunked",
    "Authorization: Bearer \udcff",
    "Content-Type: \udcff",
    "Origin: https://example.com",
    "Origin: null",
    "Origin: http://\udcff",
    "Host: \udcff",
    "Sec-Fetch-Site: cross-site",
    "X-Request-Id: \udcff",
    "X-Request-Id: " + "a" * 500,
    "Expect: 100-continue",
    "Expect: \udcff",
    "Expect: nonsense",
    "Upgrade: websocket",
    "Cookie: a=b",
    "X: " + "a" * 500,
)


@st.composite
def requests(draw: st.DrawFn, *, is_damaged: bool = True) -> bytes:
    """The bytes of a request, of which fields and headers may be wrong, and single bytes if `is_damaged`."""
    path = draw(st.sampled_from(_PATHS))
    fields = dict(PLAIN.get(path, {}))
    if meant := _FIELDS.get(path):
        names = draw(st.lists(st.sampled_from([*meant]), max_size=6))
        fields |= {name: draw(meant[name] if draw(st.integers(0, 9)) else anything) for name in names}
    fields |= draw(st.dictionaries(texts, anything, max_size=1)) if not draw(st.integers(0, 9)) else {}
    body = json.dumps(fields).encode()
    body = draw(damaged(body)) if is_damaged else body
    head = (
        f"{draw(st.sampled_from([*['POST'] * 12, 'GET', 'PUT', 'HEAD']))} {path} HTTP/1.1",
        "Host: localhost",
        "Connection: close",
        "Content-Type: application/json",
        *(draw(st.lists(st.sampled_from(_HEADERS), max_size=2)) if not draw(st.integers(0, 3)) else ()),
        f"Content-Length: {len(body)}",
    )
    written = "\r\n".join((*head, "", "")).encode(errors="surrogateescape")
    return (draw(damaged(written)) if is_damaged else written) + body


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """Return the same bytes, mostly; else with some of them lost, doubled or changed."""
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
    assert all(status < 500 or status == 503 for status in statuses), answer[-2000:]
    assert 503 in statuses or not any(word in answer for word in _BAD_WORDS), answer[-2000:]


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
def unharmed_server(directory: Path) -> Iterator[Served]:
    """Yield a server of a real engine; fail unless its state is the same at the end, without a server error.

    Every request ends after some dozens of tokens.
    """
    limits = ("--max-model-len", "64", "--kv-cache-tokens", "512")
    with served(directory, "--num-instances", "2", *limits) as server:
        before = _plain_answer(server)
        yield server
        assert _plain_answer(server) == before
        assert httpx.get(f"{server.url}/health", timeout=20).status_code == 200
        assert not any(words in server.log for words in ("Traceback", " ERROR ")), server.log


def _plain_answer(server: Served) -> object:
    answer = httpx.post(f"{server.url}/v1/completions", json=dict(PLAIN["/v1/completions"]), timeout=20)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


@contextmanager
def server_in_a_thread(tokenizer: Tokenizer) -> Iterator[tuple[str, int]]:
    """Yield the address of a server that waits for no one, over an engine that repeats prompts."""
    with in_a_thread(serving_with(tokenizer)(ScriptedEngine(), idle_timeout=0.05, body_timeout=0.05)) as url:
        host, port = url.removeprefix("http://").split(":")
        yield host, int(port)


@contextmanager
def in_a_thread(serving: AbstractAsyncContextManager[str]) -> Iterator[str]:
    """Yield the result of a server's context, while its event loop runs in a thread."""
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
    """Return the bytes of a message between engine and workers, of which a few may be wrong."""
    return draw(damaged(encode(draw(st.sampled_from((*COMMANDS, *REPORTS))))) | st.binary(max_size=100))
