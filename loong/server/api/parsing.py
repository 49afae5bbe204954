"""Checks of a body against its schema.

An unknown field is refused by name, never ignored, except a few well-known fields without an effect on the
answer.
"""

import re
from collections.abc import Mapping, Sequence, Sized
from typing import TypeVar, get_args

import msgspec
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from loong.core.limits import number_text
from loong.core.similar_words import meant
from loong.foreign_json import NOT_JSON
from loong.server.api.errors import ApiError, bad_request
from loong.server.api.schema_base import Schema

HARMLESS = frozenset({"store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"})
NEUTRAL: Mapping[str, object] = {  # unsupported fields, and the value that asks for nothing
    "suffix": "",
    "tools": [],
    "tool_choice": "none",
    "parallel_tool_calls": True,
    "modalities": ["text"],
    "use_beam_search": False,
    "length_penalty": 1,
    "include_stop_str_in_output": False,
    "spaces_between_special_tokens": True,
    "continue_final_message": False,
    "bad_words": [],
    "return_tokens_as_token_ids": False,
    "logits_processors": [],
    "early_stopping": False,
    "echo": False,
}
_MAX_NAME = 64  # characters
_OURS = "Value error, "  # how pydantic's messages of errors in our own words begin
_SUBJECT = re.compile(r"^\w+ should ")  # how its other ones begin
_OBJECT = re.compile(r"a valid dictionary(?: or instance of \w+)?")
_COUNT = re.compile(r" after validation, not \w+$")
_ENDPOINTS: Mapping[str, str] = {  # by the field that each cannot do without
    "prompt": "/v1/completions",
    "messages": "/v1/chat/completions",
    "input": "/v1/responses",
    "inputs": "/generate",
}
_LIKENESS = 0.75  # of two names, from which one may be a misspelling of the other

Fields = TypeVar("Fields", bound=Schema)


def read_json(body: bytes) -> object:
    """Return the value of a body. Raises a 400 if it is not JSON."""
    try:
        return msgspec.json.decode(body)
    except NOT_JSON as error:
        raise bad_request(f"the body is not valid JSON: {error}", None, "invalid_json") from error


def check(content: object, schema: type[Fields]) -> Fields:
    """Return the value of a body as `schema`. Raises a 400 that names the first wrong field."""
    if not isinstance(content, dict):
        raise bad_request(f"the body must be a JSON object, but is {type(content).__name__}", None)
    try:
        return schema.model_validate(_asked_for(content, schema))
    except ValidationError as error:
        raise _name_field(error.errors(include_url=False, include_context=False)[0], schema) from error


def _asked_for(content: Mapping[str, object], schema: type[Schema]) -> dict[str, object]:
    """Return the fields without those that are null or neutral."""
    return {
        name: value
        for name, value in content.items()
        if name in schema.model_fields or (name not in HARMLESS and not _is_neutral(name, value))
    }


def _is_neutral(name: str, value: object) -> bool:
    """Return whether an unsupported field has the value that asks for nothing."""
    neutral = NEUTRAL.get(name)
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)  # true equals 1


def short(name: str) -> str:
    """Return a name, shortened to a bounded length, because clients choose names freely."""
    return name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]}..."


def _name_field(error: ErrorDetails, schema: type[Schema]) -> ApiError:
    names = [short(str(part)) for part in error["loc"]]
    field = names[0] if names else None
    path = ".".join(names)
    if error["type"] == "extra_forbidden":
        but = f" (only {NEUTRAL[path]!r} is)" if path in NEUTRAL else _meant(error["loc"], schema)
        return bad_request(f"{path} is not supported{but}", field, "unsupported_parameter")
    if error["type"] == "value_error":  # in our own words
        return bad_request(f"{path}: {error['msg'].removeprefix(_OURS)}", field)
    if error["type"] == "missing":
        return bad_request(f"{path} is missing{_other_endpoint(names, error['input'])}", field)
    needed = _COUNT.sub("", _OBJECT.sub("an object", _SUBJECT.sub("", error["msg"])))
    return bad_request(f"{path} must {needed}, but {_given(error['input'], needed)}", field)


def _given(value: object, needed: str) -> str:
    """Return what a value has or is instead of what is needed of it."""
    if isinstance(value, Sized) and needed.startswith("have"):
        return f"has {len(value)}"
    match value:
        case None:
            return "is null"
        case bool():
            return f"is {str(value).lower()}"
        case int() | float():
            return f"is {number_text(value)}"
        case str():
            return f"is {short(value)!r}"
        case dict():
            return "is an object"
        case _:
            return "is a list"


def _other_endpoint(names: Sequence[str], body: object) -> str:
    """Return a hint at the endpoint that takes a body in which a field is missing, or an empty string."""
    others = [name for name in _ENDPOINTS if len(names) == 1 and isinstance(body, dict) and name in body]
    return f"; {_ENDPOINTS[others[0]]} takes {others[0]}" if others else ""


def _meant(place: Sequence[int | str], schema: type[Schema]) -> str:
    """Return a hint for a name that is similar to a field of the same object, or an empty string."""
    schemas = [schema]
    for part in place[:-1]:
        inner = [field.annotation for each in schemas if (field := each.model_fields.get(str(part)))]
        schemas = [found for annotation in inner for found in _schemas_in(annotation)] or schemas
    return meant(str(place[-1]), [name for each in schemas for name in each.model_fields], _LIKENESS)


def _schemas_in(annotation: object) -> list[type[Schema]]:
    """Return the schemas that a field's type names."""
    if isinstance(annotation, type) and issubclass(annotation, Schema):
        return [annotation]
    return [found for part in get_args(annotation) for found in _schemas_in(part)]
