"""The tools of one request."""

from collections.abc import Mapping
from dataclasses import dataclass

from loong.core.errors import InvalidRequestError
from loong.core.grammar import Grammar
from loong.grammar.schema import supported
from loong.server.api.errors import bad_request
from loong.server.tools.fields import FunctionFields, ToolUseFields
from loong.server.tools.formats import FORMATS, CallFormat
from loong.server.tools.grammar import calls_grammar
from loong.server.tools.parser import CallParser


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that an answer may call, by their index, and the format of calls."""

    form: CallFormat
    functions: Mapping[int, FunctionFields]
    is_forced: bool
    is_parallel: bool

    @property
    def prompt_ending(self) -> str:
        """The end of the prompt, where the answer continues."""
        return self.form.in_prompt if self.is_forced else ""

    def grammar(self, or_schema: str | None = None) -> Grammar:
        """Return the grammar of calls, or of calls and JSON of a schema.

        Raises a 400 that names a tool if a call cannot follow the schema of its arguments.
        """
        schemas = {function.name: _checked(index, function) for index, function in self.functions.items()}
        return calls_grammar(self.form, schemas, is_parallel=self.is_parallel, or_schema=or_schema)

    def parser(self) -> CallParser:
        """Return a parser for one answer."""
        names = frozenset(function.name for function in self.functions.values())
        return CallParser(self.form, names, is_forced=self.is_forced, is_parallel=self.is_parallel)


def tool_use(fields: ToolUseFields, form: CallFormat | None) -> ToolUse | None:
    """Return the tools of a request, or None. Raises a 400 if the server knows no format of calls."""
    choice = fields.tool_choice
    if not fields.tools or choice.type == "none":
        return None
    if form is None:
        message = (
            "tools: the format of this model's calls is not known; "
            f"loong serve --tool-call-parser names one of {', '.join(FORMATS)}"
        )
        raise bad_request(message, "tools", "unsupported_parameter")
    name = None if choice.function is None else choice.function.name
    called = {i: tool.function for i, tool in enumerate(fields.tools) if name in (None, tool.function.name)}
    is_parallel = fields.parallel_tool_calls and name is None
    return ToolUse(form, called, choice.type != "auto", is_parallel)


def _checked(index: int, function: FunctionFields) -> Mapping[str, object]:
    """Return the schema of a tool's arguments.

    Raises a 400 that names the tool if the schema is unsupported.
    """
    schema = function.parameters
    if "$ref" not in schema:  # a reference has no other keys
        schema = {"type": "object", **schema}
    try:
        supported(schema)
    except InvalidRequestError as error:
        raise bad_request(
            f"tools.{index}.function.parameters: {error}; only calls that are not forced may have it",
            "tools",
            "invalid_schema",
        ) from error
    has_arguments = "$ref" in schema or bool(schema.get("properties"))
    return schema if has_arguments else {"additionalProperties": False, **schema}
