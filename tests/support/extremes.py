"""Requests with one value at its extreme, made from a server's document, and what must hold of them."""

import asyncio
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from aiohttp import ClientSession
from json_places import Json, Place, bodies, places

PLAIN: Mapping[str, Mapping[str, object]] = {  # what each address answers with 200
    "/v1/completions": {"prompt": "a", "max_tokens": 2, "temperature": 0},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/generate": {"inputs": "a", "parameters": {"max_new_tokens": 2}},
    "/generate_stream": {"inputs": "a", "parameters": {"max_new_tokens": 2}},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [97]},
}
_COMPANIONS: Mapping[str, Mapping[str, object]] = {  # other fields that a field needs
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "messages": {"prompt": None},
}
_OF_PROMPTS: Mapping[str, frozenset[str]] = {  # what else a refusal of a prompt that became too long names
    "tools": frozenset({"messages", "input"}),
    "instructions": frozenset({"input"}),
}
_COMPANIONS_WITHIN: Mapping[str, Mapping[str, object]] = {  # the same, within a field
    "json_schema": {"type": "json_schema"},
    "text": {"type": "text"},
    "content": {"role": "user"},
}
_POWERS = [sign * 2**power + step for power in (31, 53, 63, 64) for sign in (1, -1) for step in (-1, 0, 1)]
_NUMBERS = (
    *("0", "-1", "-0.0", "1.5", *map(str, _POWERS)),
    *(f"{sign}1{zeros}" for sign in ("", "-") for zeros in ("0" * 400, "0" * 5000)),
    *("1e308", "-1e308", "1e400", "-1e400", "1e-320", "-5e-324", "NaN", "Infinity", "-Infinity"),
)
_OTHERS = (
    *("null", "true", "false", '""', '"a"', '"1"', '"\\u0000"', '"\\ud800"', f'"{"a" * 100_000}"'),
    *("[]", "[null]", "[[]]", '[""]', '["a",1]', "[" * 190 + "]" * 190, f"[{','.join(['0'] * 5000)}]"),
    *("{}", '{"":null}', '{"a":{}}', json.dumps({str(n): 0 for n in range(2000)})),
)
_KEYWORDS = (  # of JSON schemas, whose numbers a grammar is made of
    *(("string", name) for name in ("minLength", "maxLength")),
    *(("integer", name) for name in ("minimum", "exclusiveMaximum", "multipleOf")),
    *(("number", name) for name in ("maximum", "exclusiveMinimum")),
    *(("array", name) for name in ("minItems", "maxItems")),
    *(("object", name) for name in ("minProperties", "maxProperties")),
)
_VALUE = "the value"  # where it is put into a body


@dataclass(frozen=True)
class Extreme:
    """A request: its address, its body, and the fields of which one is at fault if any is."""

    address: str
    body: str
    fields: frozenset[str]


def extremes(document: Json) -> Iterator[Extreme]:
    """Yield every place of every body with every extreme; a place that several bodies share, of the first.

    Operators' bodies have tests of their own, since a server has to allow them.
    """
    seen: set[tuple[object, ...]] = set()
    users = {address: schema for address, schema in bodies(document).items() if address in PLAIN}
    assert all(address.startswith("/admin/") for address in bodies(document).keys() - PLAIN.keys())
    for address, schema in users.items():
        texts: dict[tuple[str | int, ...], dict[str, None]] = {}  # by place, each once
        for place in places(schema, document):
            texts.setdefault(place.path, {}).update(dict.fromkeys(_texts(place)))
        for path, tried in texts.items():
            if path and (key := (path, *tried)) not in seen:
                seen.add(key)
                yield from _at(address, path, tried)
    for kind, keyword in _KEYWORDS:
        path = ("response_format", "json_schema", "schema", keyword)
        yield from _at("/v1/chat/completions", path, _NUMBERS, {"type": kind, "items": {"type": "null"}})


def _texts(place: Place) -> Sequence[str]:
    """Return the values to try there, as JSON and as what is none."""
    if not place.is_number:
        return ("1", "-0.0", "18446744073709551616", "1e308", "NaN", *_OTHERS)
    low, high = place.schema["minimum"], place.schema["maximum"]
    steps = (0, 1) if isinstance(low, int) else (0.0, 1e-9, 1.0)
    companions = [number for step in steps for number in (low - step, low + step, high - step, high + step)]
    return (*map(json.dumps, companions), *_NUMBERS, *_OTHERS[:8])


def _at(
    address: str, path: Sequence[str | int], texts: Iterable[str], companions: Json | None = None
) -> Iterator[Extreme]:
    field, value = str(path[0]), _nested(path[1:], companions or {})
    companions = _COMPANIONS.get(field, {})
    template = json.dumps({**PLAIN[address], **companions, field: value})
    before, after = template.split(json.dumps(_VALUE))
    for text in texts:
        fields = frozenset({field, *companions}) | _OF_PROMPTS.get(field, frozenset())
        yield Extreme(address, before + text + after, fields)


def _nested(path: Sequence[str | int], companions: Json) -> object:
    """Return lists and objects around the value; the innermost has more fields."""
    if not path:
        return _VALUE
    name, *rest = path
    inner = _nested(rest, companions)
    if isinstance(name, int):
        return [inner]
    return {**_COMPANIONS_WITHIN.get(name, {}), **({} if rest else companions), name: inner}


async def wrong_answers(url: str, requests: Iterable[Extreme], at_once: int = 16) -> Sequence[str]:
    """Send all; return a line for each answer that is no success and no refusal that names the field."""
    left, wrong = iter(requests), list[str]()
    async with ClientSession() as session:

        async def send() -> None:
            for request in left:
                headers = {"Content-Type": "application/json"}
                async with session.post(url + request.address, data=request.body, headers=headers) as answer:
                    text = await answer.text()
                if why := _what_is_wrong(request.fields, answer.status, text):
                    wrong.append(f"{request.address} {request.body[:300]}: {why}")

        await asyncio.gather(*(send() for _ in range(at_once)))
    return wrong


def _what_is_wrong(fields: Collection[str], status: int, text: str) -> str | None:
    """Return why an answer breaks the law; None if it keeps it."""
    if status >= 500 or '"server_error"' in text:
        return None if status == 503 else f"{status} {text[:300]}"
    if status < 300:
        return None
    error = json.loads(text)["error"]
    is_named = error["param"] in fields or error["code"] == "invalid_json"
    return None if is_named else f"{status} {text[:300]}, which names none of {sorted(fields)}"
