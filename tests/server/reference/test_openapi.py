"""The document says what the server does: random requests of it never break the server or its own word."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import pytest
import schemathesis
from examples import examples
from http_answers import error_of, events_of, get_json, post
from json_places import Place, bodies, places
from listening import BESIDE_ITS_ENGINE
from schemathesis.specs.openapi.checks import positive_data_acceptance
from scripted_engine import ScriptedEngine, Serving, say

from loong.core.limits import LIMITS, NUM_SEEDS
from loong.server.answers.chats import ChatCompletionChunk
from loong.server.answers.completions import Completion
from loong.server.answers.errors import Error
from loong.server.api.listen import bound_socket, serve
from loong.server.api.parsing import HARMLESS
from loong.server.app import create_app
from loong.server.reference.api_reference import api_reference
from loong.server.reference.openapi import document
from loong.server.settings import ServerSettings
from loong.server.text.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]
WRITTEN = Path(__file__).parents[3] / "docs" / "api.md"
described = schemathesis.openapi.from_dict(document())


@pytest.fixture(scope="module")
def address(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield a server in a thread of its own, for requests that are sent from this one."""
    with bound_socket("127.0.0.1", 0) as listener:
        loop = asyncio.new_event_loop()
        thread = Thread(target=loop.run_forever)
        thread.start()

        async def start() -> Any:
            app = create_app(ScriptedEngine(), tokenizer, ServerSettings("tiny", admin_key="operators-key"))
            return await serve(app, listener, shutdown_timeout=1.0)

        runner = asyncio.run_coroutine_threadsafe(start(), loop).result()
        yield "http://{}:{}".format(*runner.addresses[0])
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@described.parametrize()
@examples(6, thorough=24)
def test_no_request_breaks_the_server_or_its_word(case: schemathesis.Case[Any], address: str) -> None:
    """A request that fits the document may be refused, as no document knows the tokens of a text."""
    case.call_and_validate(base_url=address, timeout=60, excluded_checks=[positive_data_acceptance])


async def test_every_route_is_described_but_the_dashboards(tokenizer: Tokenizer) -> None:
    app = create_app(ScriptedEngine(), tokenizer, ServerSettings("tiny"))
    routes = {
        (route.method.lower(), route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    described = {(method, path) for path, methods in document()["paths"].items() for method in methods}
    assert described == {route for route in routes if not route[1].startswith("/dashboard")}


def test_the_written_reference_is_current() -> None:
    assert WRITTEN.read_text() == api_reference(), "run `loong reference --api > docs/api.md`"


async def test_the_document_is_served_and_valid(serving: Serving) -> None:
    async with serving(ScriptedEngine()) as url:
        served = await get_json(url, "/openapi.json")
    assert served == document()
    schemathesis.openapi.from_dict(served).validate()


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_events_are_of_their_schemas(serving: Serving, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body: dict[str, Any] = {"stream": True, "stream_options": options, "return_token_ids": True, "n": 1}
    body |= {"messages": MESSAGES, "top_logprobs": 2} if "chat" in path else {"prompt": ["a", "b"]}
    async with serving(ScriptedEngine(say("aé"))) as url:
        events = events_of(await post(url, path, logprobs="chat" in path or 2, **body))
    model = ChatCompletionChunk if "chat" in path else Completion
    for event in events:
        msgspec.convert(event, model)
    async with serving(ScriptedEngine(fail_at=1)) as url:
        *_, error = events_of(await post(url, path, logprobs="chat" in path or 2, **body))
    msgspec.convert(error, Error)


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/audio/speech"])
async def test_an_unknown_path_is_refused_with_the_known_ones(serving: Serving, path: str) -> None:
    async with serving(ScriptedEngine()) as url:
        error = await error_of(url, path, 404, model="tiny", input="a")
    assert path in error["message"]
    assert "/v1/chat/completions" in error["message"]


def test_every_number_of_every_body_has_both_bounds() -> None:
    unbounded = [
        (address, place.path)
        for address, schema in bodies(document()).items()
        for place in places(schema, document())
        if not (place.is_bounded or is_dropped(place))
    ]
    assert not unbounded


def is_dropped(place: Place) -> bool:
    """Return whether the field there is ignored: some fields, and parts of messages except their texts."""
    return place.path[-1] in HARMLESS or (place.path[0] in ("messages", "input") and not place.is_number)


def test_the_bounds_are_those_that_the_engine_holds_requests_to() -> None:
    numbers = {
        place.path[-1]: place.schema
        for schema in bodies(document()).values()
        for place in places(schema, document())
        if place.is_number and isinstance(place.path[-1], str)
    }
    own = {name: LIMITS[name] for name in numbers.keys() & LIMITS.keys()}
    own |= {"max_completion_tokens": LIMITS["max_tokens"], "best_of": LIMITS["n"]}
    reported = {name: (numbers[name]["minimum"], numbers[name]["maximum"]) for name in own}
    most_tokens = LIMITS["max_tokens"][1]
    assert reported == own | {
        "top_k": (-1, LIMITS["top_k"][1]),
        "seed": (-NUM_SEEDS, NUM_SEEDS - 1),
        "top_p": (0, 1.0),  # 0 takes the likeliest token
        "max_tokens": (0, most_tokens),  # of an answer about the prompt alone
        "max_completion_tokens": (0, most_tokens),
    }
    assert own.keys() >= LIMITS.keys() - {"logit_bias"}  # of which the numbers have names of their own
