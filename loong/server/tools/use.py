"""How one request uses tools."""

from collections.abc import Mapping
from dataclasses import dataclass

from loong.core.errors import InvalidRequestError
from loong.grammar.schema import supported
from loong.server.errors import bad_request
from loong.server.tools.fields import FunctionFields, ToolUseFields
from loong.server.tools.formats import FORMATS, CallFormat
from loong.server.tools.grammar import calls_grammar
from loong.server.tools.parser import CallParser


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What an answer may call, and how its text is read. `grammar` is what it is held to, if to anything."""

    form: CallFormat
    names: frozenset[str]
    is_forced: bool
    is_parallel: bool
    grammar: str | None = None

    @property
    def prompt_ending(self) -> str:
        """Return the text that the prompt ends with, where the answer goes on."""
        return self.form.in_prompt if self.is_forced else ""

    def parser(self) -> CallParser:
        """Return what reads one answer."""
        return CallParser(self.form, self.names, is_forced=self.is_forced, is_parallel=self.is_parallel)


def grammar_field(tools: ToolUse | None) -> str:
    """Return the field that says what an answer is held to."""
    return "tools" if tools is not None and tools.is_forced else "response_format"


def tool_use(fields: ToolUseFields, schema: str | None, form: CallFormat | None) -> ToolUse | None:
    """Return how a request uses tools; None if it does not.

    `schema` is the JSON schema that an answer without calls is held to. `form` is the server's. Raises a 400
    if there is none, or for a schema of arguments that a forced call cannot be held to.
    """
    choice = fields.tool_choice
    if not fields.tools or choice.type == "none":
        return None
    if form is None:
        message = (
            "tools: the format of this model's calls is not known; loong serve --tool-call-parser names one"
        )
        raise bad_request(f"{message} of {', '.join(FORMATS)}", "tools", "unsupported_parameter")
    is_forced = choice.type != "auto"
    if is_forced and schema is not None:
        message = "response_format cannot be used with a tool_choice that forces a call"
        raise bad_request(message, "response_format")
    name = None if choice.function is None else choice.function.name
    called = {i: tool.function for i, tool in enumerate(fields.tools) if name in (None, tool.function.name)}
    is_parallel = fields.parallel_tool_calls and name is None
    grammar = None
    if is_forced or schema is not None:
        schemas = {function.name: _checked(index, function) for index, function in called.items()}
        grammar = calls_grammar(form, schemas, is_parallel=is_parallel, or_schema=schema)
    names = frozenset(function.name for function in called.values())
    return ToolUse(form, names, is_forced, is_parallel, grammar)


def _checked(index: int, function: FunctionFields) -> Mapping[str, object]:
    """Return the schema of a tool's arguments; raise a 400 that names it if no call can be held to it."""
    schema = {"type": "object", **function.parameters}
    try:
        supported(schema)
    except InvalidRequestError as error:
        raise bad_request(
            f"tools.{index}.function.parameters: {error}; a call that is not forced may have it",
            "tools",
            "invalid_schema",
        ) from error
    return schema if schema.get("properties") else {"additionalProperties": False, **schema}
