"""The API as one OpenAPI document, made from the schemas of requests and answers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from operator import or_
from typing import Any, TypeAlias

import msgspec
from aiohttp import web
from msgspec import Struct
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import loong
from loong.server.answers import status
from loong.server.answers.base import described
from loong.server.answers.chats import ChatCompletion, ChatCompletionChunk
from loong.server.answers.completions import Completion
from loong.server.answers.errors import Error
from loong.server.answers.lightllm import Generated, GeneratedEvent
from loong.server.answers.responses import Response, ResponseEvent
from loong.server.api.middleware import ADMIN_PATHS, OPEN_PATHS, OPERATOR_PATHS
from loong.server.api.parsing import HARMLESS, NEUTRAL
from loong.server.api.schema_base import Schema
from loong.server.api.sse import BARE_STREAM, OPENAI_STREAM, StreamFormat
from loong.server.fault_injection import FaultFields
from loong.server.lightllm.fields import GenerateFields
from loong.server.openai import schemas
from loong.server.responses.fields import ResponseFields
from loong.server.scaling import ScaleFields
from loong.server.structured.free_json import VALUE_NAME, VALUE_SCHEMA

Json: TypeAlias = dict[str, Any]

_EVENT_STREAM = "text/event-stream"
_COMPONENTS = "#/components/schemas/"
_WHY = {
    400: "What was sent cannot be served; `param` names the field at fault.",
    401: "The server has API keys, and none of them was sent.",
    403: "A browser page of a foreign origin sends it, or its Host is none of a server on loopback. Or an "
    "operator sends it, and the server has no admin key.",
    404: "There is no such thing here, or no such model.",
    408: "The body did not arrive in time.",
    409: "The instance or engine is not live, or none is; or a live request may need more KV than is left.",
    413: "The body is too long.",
    415: "The body is compressed, or its Content-Type is not JSON.",
    429: "This API key has as many requests in flight as it may have; `Retry-After` says when to come back.",
    500: "The request failed; others go on.",
    503: "The queue is full, the server stops, or the engine does; `Retry-After` says when to come back.",
}
_OF_ENGINE = "Of several engines, `?engine=0` and so on names one."
_OF_BODIES = (400, 404, 408, 413, 415, 503)


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    summary: str
    answer: type[Struct] | str  # JSON, or another media type
    errors: Sequence[int] = ()
    request: type[Schema] | None = None
    event: type[Struct] | None = None  # of a stream, if the endpoint can stream
    stream_format: StreamFormat = OPENAI_STREAM
    query: Sequence[Json] = ()  # parameters


OPERATIONS = (
    Operation(
        "post",
        "/v1/completions",
        "Complete a text, or each of several.",
        Completion,
        (*_OF_BODIES, 429, 500),
        schemas.CompletionFields,
        Completion,
    ),
    Operation(
        "post",
        "/v1/chat/completions",
        "Continue a conversation.",
        ChatCompletion,
        (*_OF_BODIES, 429, 500),
        schemas.ChatFields,
        ChatCompletionChunk,
    ),
    Operation(
        "post",
        "/generate",
        "Continue a text, as LightLLM's server does.",
        Generated,
        (*_OF_BODIES, 429, 500),
        GenerateFields,
    ),
    Operation(
        "post",
        "/generate_stream",
        "The same, streamed without a last `[DONE]` and without comments.",
        _EVENT_STREAM,
        (*_OF_BODIES, 429, 500),
        GenerateFields,
        GeneratedEvent,
        BARE_STREAM,
    ),
    Operation(
        "post",
        "/v1/responses",
        "Answer a conversation. Nothing is stored.",
        Response,
        (*_OF_BODIES, 429, 500),
        ResponseFields,
        ResponseEvent,
        BARE_STREAM,
    ),
    Operation("get", "/v1/models", "The model that is served.", status.ModelList),
    Operation("get", "/v1/models/{model}", "One model by its name.", status.Model, (404,)),
    Operation(
        "post",
        "/tokenize",
        "Token ids of a text or of a chat.",
        status.Tokenized,
        _OF_BODIES,
        schemas.TokenizeFields,
    ),
    Operation(
        "post",
        "/detokenize",
        "The text of token ids, special tokens included.",
        status.Detokenized,
        _OF_BODIES,
        schemas.DetokenizeFields,
    ),
    Operation(
        "get",
        "/health",
        "Whether the server serves, and with all its instances.",
        status.HealthStatus,
        (503,),
    ),
    Operation("get", "/ping", "The same.", status.HealthStatus, (503,)),
    Operation("post", "/ping", "The same.", status.HealthStatus, (503,)),
    Operation("get", "/version", "The version of loong.", status.Version),
    Operation("get", "/load", "How many requests are in flight.", status.Load),
    Operation("get", "/metrics", "All metrics, for Prometheus.", "text/plain"),
    Operation("get", "/trace", f"The last minutes of the cluster, for Perfetto. {_OF_ENGINE}", status.Trace),
    Operation("get", "/openapi.json", "This document.", status.Document),
    Operation(
        "post",
        "/reset_prefix_cache",
        "Evict all cached KV that no request reads.",
        status.Status,
    ),
    Operation(
        "post",
        "/start_profile",
        f"Begin a trace, and answer once all workers have. {_OF_ENGINE}",
        status.Status,
        (400, 404, 500),
    ),
    Operation("post", "/stop_profile", "End it, and name its file.", status.TraceFile, (400, 404, 500)),
    Operation(
        "post",
        "/admin/faults",
        "Inject a fault, on a server with `--allow-fault-injection`.",
        status.InjectedFault,
        (*_OF_BODIES, 409, 500),
        FaultFields,
    ),
    Operation("get", "/admin/instances", f"The instances and their states. {_OF_ENGINE}", status.Instances),
    Operation(
        "post",
        "/admin/scale",
        f"Change the number of instances of a server on CPUs, while requests go on. {_OF_ENGINE}",
        status.Instances,
        (*_OF_BODIES, 409),
        ScaleFields,
        query=(
            {
                "name": "wait",
                "in": "query",
                "description": "Answer when the change is done.",
                "schema": {"type": "boolean", "default": False},
            },
        ),
    ),
)


async def openapi(http: web.Request) -> web.Response:  # noqa: ARG001 (a handler takes a request)
    """Return the OpenAPI document."""
    return web.Response(body=_encoded(), content_type="application/json")


@cache
def _encoded() -> bytes:
    return msgspec.json.encode(document())


def document() -> Json:
    """The OpenAPI document of every server."""
    paths: dict[str, Json] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "loong",
            "version": loong.__version__,
            "description": "The OpenAI API's completions and chats, with vLLM's additions.",
        },
        "paths": paths,
        "components": {
            "schemas": _component_schemas(),
            "securitySchemes": {name: {"type": "http", "scheme": "bearer"} for name in ("key", "admin_key")},
        },
    }


def _described(operation: Operation) -> Json:
    is_open = operation.path in OPEN_PATHS
    statuses = sorted({*operation.errors, 403, *(() if is_open else (401,))})
    described: Json = {
        "operationId": f"{operation.method}{operation.path.replace('/', '_')}".replace("{model}", "model"),
        "summary": operation.summary,
        "responses": {
            "200": {"description": operation.summary, "content": dict(_contents(operation))},
            **{str(status): _error(status) for status in statuses},
        },
        "security": _security(operation.path),
    }
    if operation.request is not None:
        content = {"application/json": {"schema": _reference(operation.request)}}
        described["requestBody"] = {"required": True, "content": content}
    if operation.query:
        described["parameters"] = list(operation.query)
    if "{model}" in operation.path:
        name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        described["parameters"] = [name]
    return described


def _security(path: str) -> list[Json]:
    if path in ADMIN_PATHS:
        return [{"admin_key": []}]
    if path in OPERATOR_PATHS:
        return [{"admin_key": []}, {"key": []}, {}]
    return [{}] if path in OPEN_PATHS else [{"key": []}, {}]


def _contents(operation: Operation) -> Iterator[tuple[str, Json]]:
    if not isinstance(operation.answer, str):
        yield "application/json", {"schema": _reference(operation.answer)}
    elif operation.event is None:
        yield operation.answer, {"schema": {"type": "string"}}
    if operation.event is not None:
        yield _EVENT_STREAM, {"schema": _event(operation.event, operation.stream_format)}


def _event(model: type[Struct], form: StreamFormat) -> Json:
    """Return the schema of one event of a stream."""
    reported = {"anyOf": [_reference(model), _reference(Error)]}
    data: Json = {"type": "string", "contentMediaType": "application/json", "contentSchema": reported}
    description = f"A `{model.__name__}`, or an `Error`"
    if form.last_event:
        data, description = {"anyOf": [data, {"const": "[DONE]"}]}, f"{description}; the last one is `[DONE]`"
    return {
        "type": "object",
        "description": f"{description}.",
        "properties": {"data": data},
        "required": ["data"],
    }


def _error(status: int) -> Json:
    content = {"application/json": {"schema": _reference(Error)}}
    return {"description": _WHY[status], "content": content}


def _reference(model: type[BaseModel | Struct]) -> Json:
    return {"$ref": f"{_COMPONENTS}{model.__name__}"}


def _component_schemas() -> Json:
    requests = [op.request for op in OPERATIONS if op.request is not None]
    template = _COMPONENTS + "{model}"
    _, asked = models_json_schema([(model, "validation") for model in requests], ref_template=template)
    is_generation = {model.__name__: issubclass(model, schemas.GenerationFields) for model in requests}
    parsed = {
        name: _as_parsed(schema, is_generation=is_generation.get(name, False))
        for name, schema in asked["$defs"].items()
    }
    return {**_answers(), **parsed, VALUE_NAME: VALUE_SCHEMA}


def _answers() -> Json:
    """Return the schemas of answers and events. A base of several events is any of them."""
    models: list[type[Struct]] = [Error]
    models += [model for op in OPERATIONS for model in (op.answer, op.event) if isinstance(model, type)]
    options = {model.__name__: model.__subclasses__() or [model] for model in models}
    by_name: Mapping[str, object] = {name: reduce(or_, options[name]) for name in options}
    found, components = described(by_name.values(), _COMPONENTS + "{name}")
    return {**dict(zip(by_name, found, strict=True)), **components}


def _as_parsed(schema: Json, *, is_generation: bool) -> Json:
    """Return a schema with the effects of parsing: null counts as absent, and fields without effect are
    allowed.
    """
    if "properties" not in schema:
        return schema
    properties = {
        name: _or_null(field) if name not in schema.get("required", ()) else field
        for name, field in schema["properties"].items()
    }
    if is_generation:
        others: Json = {name: {"description": "Taken, and of no effect."} for name in sorted(HARMLESS)}
        others |= {
            name: {"enum": [value, None], "description": "Not supported: only what asks for nothing."}
            for name, value in NEUTRAL.items()
        }
        properties = {**properties, **{name: others[name] for name in others if name not in properties}}
    return {**schema, "properties": properties}


def _or_null(field: Json) -> Json:
    """Return the schema of a field that may be null."""
    if {"type": "null"} in field.get("anyOf", ()):
        return field
    kept = field.keys() & {"title", "description", "default"}
    option = {name: value for name, value in field.items() if name not in kept}
    return {**{name: field[name] for name in field if name in kept}, "anyOf": [option, {"type": "null"}]}
