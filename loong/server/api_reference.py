"""The API as Markdown, which is docs/api.md, made of the same schemas as `/openapi.json`."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from loong.core.request import number_text
from loong.server.api_examples import EXAMPLES, Example
from loong.server.openapi import OPERATIONS, Operation, document
from loong.server.parsing import HARMLESS, NEUTRAL

Json: TypeAlias = Mapping[str, Any]

_INTRODUCTION = """\
# The API

Written by `loong reference --api > docs/api.md`; a server tells the same, for programs, at `/openapi.json`.
[clients.md](clients.md) shows clients at work. Names, meanings and defaults are the OpenAI API's, and
vLLM's for what that does not have; `slo` and what a `priority` does are loong's own.

- Bodies are JSON objects, of the Content-Type `application/json` (or `application/*+json`); others get 415.
  A field that is null counts as absent. **What is not listed here is refused by name**, never ignored, but
  for `store`, `metadata`, `service_tier`, `safety_identifier` and `prompt_cache_key`, which change no answer.
  Every number has bounds; one beyond them is refused too.
- Inside messages, where clients keep what other servers answered, unknown keys are ignored, and the log warns
  once of each. Tool calls, audio and refusals are refused by name, since the turn would lose them.
- Errors are `{"error": {"message", "type", "param", "code"}}`, with the field at fault, and both numbers
  where a limit is passed.
- Every answer to a request has an `X-Request-Id`: the client's own, if that is at most 128 characters of
  printable ASCII, else the `id` of the completion, else a new one. The log names failed requests by it.
- With `--api-key` every request but for `/health`, `/ping`, `/version`, `/metrics` and the pages at `/` and
  `/dashboard` carries `Authorization: Bearer KEY`. Where there are several keys, `--fairness user` shares
  between keys, and `--max-requests-per-key` bounds each.
- Browser pages may use the server only if it serves them itself or `--allowed-origins` names their origin.
  What others send gets 403. Without an API key, a server that listens on loopback also refuses a Host that is
  not `localhost`, a loopback address, its `--host`, or the host of an allowed origin.
- A stream's headers come when the request is admitted, comments (`: keep-alive`) while nothing else does,
  then an event a token, and `[DONE]`. What fails later is an event with an error. The text of all events is
  the text of the same answer unstreamed.
- A client that leaves ends its request, and its KV is freed when the step in flight ends.
- `response_format`, `structured_outputs` and the `guided_` fields need xgrammar (`pip install xgrammar`). They
  are refused where it cannot be imported, which the log says. A grammar is tried before its request is queued.
  It is refused by name if answers could not be held to it, if it has more than 64 KiB, or if it takes more than
  2 s or 16 MiB. Grammars let bytes pass that are no UTF-8; models that write text do not.
- Special tokens in messages are plain text, so nothing in them can end a turn or begin one; in prompts of
  `/v1/completions` they are what they are. Where a model's template writes turns as plain text (`[INST]`),
  nothing can keep messages from doing so too.
- Not supported: tools, images and sound, a `best_of` above `n`, `suffix`,
  embeddings.
"""


_TO_TRY = """\
The examples below are for `loong serve` as it starts without a flag, and tests try them all; its tiny model
writes random text. A server with keys wants `-H 'Authorization: Bearer KEY'` too.
"""


def api_reference() -> str:
    """A section an endpoint, then the objects they speak of."""
    components = document()["components"]["schemas"]
    shared = _shared(components)
    lines = [_INTRODUCTION, _TO_TRY, "## Fields of completions and chats\n", *_fields(shared, ())]
    for operation in OPERATIONS:
        lines += _section(operation, components, shared)
    lines.append("## Objects\n")
    told = {operation.request.__name__ for operation in OPERATIONS if operation.request is not None}
    for name in sorted(components.keys() - told):
        schema = components[name]
        if schema.get("properties"):
            lines += [f"### {name}\n", f"{schema.get('description', '')}\n"]
            lines += _fields(schema["properties"], schema.get("required", ()))
    return "\n".join(lines)


def _shared(components: Json) -> Json:
    """The fields that both kinds of completion have, but for those of no effect."""
    one, other = (components[name]["properties"] for name in ("CompletionFields", "ChatFields"))
    return {
        name: field
        for name, field in one.items()
        if other.get(name) == field and name not in HARMLESS and name not in NEUTRAL
    }


def _section(operation: Operation, components: Json, shared: Json) -> Iterator[str]:
    yield f"## {operation.method.upper()} {operation.path}\n"
    answer = operation.answer if isinstance(operation.answer, str) else _link(operation.answer.__name__)
    streamed = f", or streamed {_link(operation.event.__name__)}" if operation.event is not None else ""
    errors = ", ".join(map(str, sorted(operation.errors)))
    yield f"{operation.summary} Answers {answer}{streamed}{f'; errors {errors}' if errors else ''}.\n"
    for example in EXAMPLES[operation.method, operation.path]:
        yield from _example(operation, example)
    if operation.request is not None:
        schema = components[operation.request.__name__]
        properties = schema["properties"]
        own = {name: field for name, field in properties.items() if name not in (*HARMLESS, *NEUTRAL)}
        if shared.items() <= own.items():
            own = {name: field for name, field in own.items() if name not in shared}
            yield "Besides the fields of all completions and chats:\n"
        yield from _fields(own, schema.get("required", ()))


def _example(operation: Operation, example: Example) -> Iterator[str]:
    if example.purpose:
        yield f"{example.purpose}\n"
    yield f"```bash\n{example.command(operation.method, operation.path)}\n```\n"
    if example.answer:
        language = "text" if example.answer.startswith("data:") else "json"
        yield f"```{language}\n{example.answer}\n```\n"


def _fields(properties: Json, required: Iterable[str]) -> Iterator[str]:
    yield "| field | type | default | meaning |\n|---|---|---|---|"
    for name, field in properties.items():
        default = "required" if name in required else _default(field)
        meaning = " ".join(field.get("description", "").split()).replace("|", "\\|")
        yield f"| `{name}` | {_type(field)} | {default} | {meaning} |"
    yield ""


def _default(field: Json) -> str:
    default = field.get("default")
    return "" if default is None else f"`{json.dumps(default)}`"


def _type(field: Json) -> str:
    if "$ref" in field:
        return _link(field["$ref"].rsplit("/", 1)[-1])
    if "anyOf" in field:
        options = [_type(option) for option in field["anyOf"] if option.get("type") != "null"]
        return " or ".join(dict.fromkeys(options))
    if "enum" in field:
        return " or ".join(f"`{json.dumps(value)}`" for value in field["enum"])
    if "const" in field:
        return f"`{json.dumps(field['const'])}`"
    kind = str(field.get("type", "anything"))
    if kind == "array":
        return f"list of {_type(field.get('items', {}))}" + _range(field, "minItems", "maxItems")
    if kind == "string":
        return kind + _range(field, "minLength", "maxLength", " characters")
    return kind + _range(field, "minimum", "maximum")


def _range(field: Json, low: str, high: str, unit: str = "") -> str:
    """Both bounds in words."""
    least, most = field.get(low), field.get(high)
    if most is not None:
        begin = "up" if least is None else number_text(least)
        return f" ({begin} to {number_text(most)}{unit})"
    return "" if least is None else f" ({number_text(least)} or more{unit})"


def _link(name: str) -> str:
    return f"[{name}](#{name.lower()})"
