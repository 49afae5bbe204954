"""The API as Markdown (docs/api.md), made from the same schemas as `/openapi.json`."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from loong.server.api.parsing import HARMLESS, NEUTRAL
from loong.server.openai.schemas import GenerationFields
from loong.server.reference.api_examples import EXAMPLES, Example
from loong.server.reference.openapi import OPERATIONS, Operation, document

Json: TypeAlias = Mapping[str, Any]

_INTRODUCTION = """\
# The API

This page is made by `loong reference --api > docs/api.md`. A server has the same, with the schemas of all
answers, at `/openapi.json`. [clients.md](clients.md) shows clients. Names, meanings and defaults are the
OpenAI API's, or else vLLM's. `slo` and the effect of `priority` are loong's own.

- Bodies are JSON objects of the Content-Type `application/json` or `application/*+json`. A field that is
  null counts as absent. **Fields that are not listed here are refused by name**, except for `store`,
  `metadata`, `service_tier`, `safety_identifier`, and `prompt_cache_key`, which have no effect.
  Numbers, texts and lists have bounds (`/openapi.json`). Integers may be written as 2.0.
- Inside messages, unknown keys are ignored with a warning in the log. Audio and refusals are refused, and so
  is a turn that the model's chat template leaves out ([models.md](models.md#chat-templates)).
- Tools are functions ([clients.md](clients.md#tools)), 128 of them and 256 KiB at most. xgrammar makes
  forced calls follow their schema.
- Errors are `{"error": {"message", "type", "param", "code"}}`, with the field at fault. Two codes of 500 say
  that an admitted request cannot go on, with `X-Should-Retry: false`. `repeated_instance_loss`: instances
  were lost in a row while they computed it. `kv_capacity_lost`: the instances that are left cannot hold its
  KV.
- Every answer has an `X-Request-Id`, the client's own if it sent one. The log names failed requests by it.
- Where the server has API keys, requests carry `Authorization: Bearer KEY`.
- A stream's headers are sent when the request is admitted, then an event for each token, and `[DONE]`.
  `: keep-alive` comments fill pauses. Later failures are events with an error.
- `response_format`, `structured_outputs` and the `guided_` fields need xgrammar. A grammar is refused if
  xgrammar cannot compile it, if it has more than 64 KiB, or if it takes more than 2 s or 16 MiB. A `pattern`
  of a schema matches whole strings. `oneOf` is refused unless its branches show that no value fits two.
- Special tokens in messages are plain text, so they cannot end or begin a turn. In prompts of
  `/v1/completions` they are special.
- Not supported: built-in tools, images and sound, a `best_of` above `n`, `suffix`, several models,
  embeddings.
"""


NUM_ANSWERS = 1  # of each endpoint, so that the page stays short

_TO_TRY = """\
The examples work with `loong serve` as it starts without a flag; its tiny model writes random text.
"""


def api_reference() -> str:
    """Return a section for each endpoint, then the objects that requests contain."""
    components = document()["components"]["schemas"]
    shared = _shared(components)
    lines = [_INTRODUCTION, _TO_TRY, "## Fields of completions and chats\n", *_fields(shared, ())]
    for operation in OPERATIONS:
        lines += _section(operation, components, shared)
    lines.append("## Objects\n")
    bodies = {operation.request.__name__ for operation in OPERATIONS if operation.request is not None}
    for name in sorted(_parts(bodies, components) - bodies):
        schema = components[name]
        if _is_explained(schema):
            lines += [f"### {name}\n", f"{schema.get('description', '')}\n"]
            lines += _fields(schema["properties"], schema.get("required", ()), shared)
    return "\n".join(lines)


def _parts(names: set[str], components: Json) -> set[str]:
    """Return the names of all schemas that `names` contain, including `names`."""
    found: set[str] = set()
    ahead = set(names)
    while ahead:
        found |= ahead
        texts = (json.dumps(components[name]) for name in ahead)
        ahead = {name for text in texts for name in re.findall(r'"#/components/schemas/(\w+)"', text)} - found
    return found


def _is_explained(schema: Json) -> bool:
    """Return whether any field of an object has a description; the others are in `/openapi.json`."""
    return any(field.get("description") for field in schema.get("properties", {}).values())


def _shared(components: Json) -> Json:
    """Return the fields common to both kinds of completion, without those that have no effect."""
    one, other = (components[name]["properties"] for name in ("CompletionFields", "ChatFields"))
    return {name: one[name] for name in GenerationFields.model_fields if other[name] == one[name]}


def _section(operation: Operation, components: Json, shared: Json) -> Iterator[str]:
    yield f"## {operation.method.upper()} {operation.path}\n"
    answer = operation.answer if isinstance(operation.answer, str) else f"`{operation.answer.__name__}`"
    streamed = f", or streamed `{operation.event.__name__}`" if operation.event is not None else ""
    errors = ", ".join(map(str, sorted(operation.errors)))
    yield f"{operation.summary} Answers {answer}{streamed}{f'; errors {errors}' if errors else ''}.\n"
    for index, example in enumerate(EXAMPLES[operation.method, operation.path]):
        yield from _example(operation, example, is_answered=index < NUM_ANSWERS)
    if operation.request is not None:
        schema = components[operation.request.__name__]
        properties = schema["properties"]
        known = operation.request.model_fields
        without_effect = (HARMLESS | NEUTRAL.keys()) - known.keys()
        own = {name: field for name, field in properties.items() if name not in without_effect}
        if shared.items() <= own.items():
            own = {name: field for name, field in own.items() if name not in shared}
            yield "Besides the fields of all completions and chats:\n"
        yield from _fields(own, schema.get("required", ()), shared)


def _example(operation: Operation, example: Example, *, is_answered: bool) -> Iterator[str]:
    if example.purpose:
        yield f"{example.purpose}\n"
    yield f"```bash\n{example.command(operation.method, operation.path)}\n```\n"
    if example.answer and is_answered:
        language = "text" if example.answer.startswith("data:") else "json"
        yield f"```{language}\n{example.answer}\n```\n"


def _fields(properties: Json, required: Iterable[str], known: Json | None = None) -> Iterator[str]:
    """Yield a table of fields, then the names of the fields that equal those in `known`."""
    same = [name for name in properties if known and _text(known.get(name)) == _text(properties[name]) != ""]
    yield "|field|type|default|meaning|\n|---|---|---|---|"
    for name, field in properties.items():
        if name not in same:
            default = "required" if name in required else _default(field)
            yield f"|`{name}`|{_type(field)}|{default}|{_text(field)}|"
    yield ""
    if same:
        yield f"As for completions: {', '.join(f'`{name}`' for name in same)}.\n"


def _text(field: Json | None) -> str:
    return " ".join((field or {}).get("description", "").split()).replace("|", "\\|")


def _default(field: Json) -> str:
    default = field.get("default")
    return "" if default is None else f"`{json.dumps(default)}`"


def _type(field: Json) -> str:
    if "$ref" in field:
        return _link(field["$ref"].rsplit("/", 1)[-1])
    if options := field.get("anyOf", field.get("oneOf")):
        options = [_type(option) for option in options if option.get("type") != "null"]
        return " or ".join(dict.fromkeys(options))
    if "enum" in field:
        return " or ".join(f"`{json.dumps(value)}`" for value in field["enum"])
    if "const" in field:
        return f"`{json.dumps(field['const'])}`"
    kind = str(field.get("type", "anything"))
    if kind == "array":
        return f"list of {_type(field.get('items', {}))}"
    return kind


def _link(name: str) -> str:
    """Return a link to the section of an object, or its name if it has none."""
    schema = document()["components"]["schemas"][name]
    return f"[{name}](#{name.lower()})" if _is_explained(schema) else f"`{name}`"
