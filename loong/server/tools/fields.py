"""Fields of requests for tools, as in the OpenAI API."""

import re
from typing import Annotated, Literal, Self

import msgspec
from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from loong.server.api.schema_base import Schema
from loong.server.structured.free_json import FreeObject

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 2**18  # of all tools of a request, as JSON
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")

ToolName = Annotated[str, Field(pattern=rf"^{_NAME.pattern}$")]


def _of_objects(parameters: dict[str, object]) -> dict[str, object]:
    if (kind := parameters.get("type", "object")) != "object":
        raise ValueError(f"arguments are an object, but the schema's type is {kind!r}")
    return parameters


Parameters = Annotated[FreeObject, AfterValidator(_of_objects)]


class FunctionFields(Schema):
    """A function that the model may call; the client runs it."""

    name: ToolName
    description: str = ""
    """A description for the model: what the tool does, and when to call it."""
    parameters: Parameters = {}
    """The JSON schema of its arguments. Without one there are none."""
    strict: bool | None = None
    """Arguments of a forced call always follow the schema, others need not."""


class ToolFields(Schema):
    """A tool."""

    type: Literal["function"] = "function"
    function: FunctionFields

    def for_template(self) -> dict[str, object]:
        """Return the tool as chat templates expect it."""
        function = self.function
        described = {"description": function.description} if function.description else {}
        parameters = function.parameters or {"type": "object", "properties": {}}
        return {
            "type": self.type,
            "function": {"name": function.name, **described, "parameters": parameters},
        }


class NamedFunction(Schema):
    """A function by its name."""

    name: ToolName


class ToolChoice(Schema):
    """The choice of tools: the model chooses, none, at least one, or one by name."""

    type: Literal["none", "auto", "required", "function"]
    function: NamedFunction | None = None

    @model_validator(mode="after")
    def _names_a_function(self) -> Self:
        if (self.type == "function") != (self.function is not None):
            raise ValueError("function goes with the type function, and with no other")
        return self


class NamedToolChoice(Schema):
    """A tool by its name."""

    type: Literal["function"]
    function: NamedFunction


def _as_choice(value: object) -> object:
    return {"type": value} if isinstance(value, str) else value


_Choice = Annotated[
    ToolChoice, BeforeValidator(_as_choice, Literal["none", "auto", "required"] | NamedToolChoice)
]


class OfferedTools(Schema):
    """The tools that a prompt describes."""

    tools: Annotated[list[ToolFields], Field(max_length=MAX_TOOLS)] = []
    """The tools that the model may call. If the template has no tools, the system turn describes them."""

    @field_validator("tools")
    @classmethod
    def _are_different(cls, tools: list[ToolFields]) -> list[ToolFields]:
        names: set[str] = set()
        for tool in tools:
            if tool.function.name in names:
                raise ValueError(f"two tools have the name {tool.function.name!r}")
            names.add(tool.function.name)
        num_bytes = sum(len(msgspec.json.encode(tool.for_template())) for tool in tools)
        if num_bytes > MAX_TOOLS_BYTES:
            raise ValueError(
                f"they have {num_bytes} bytes of JSON, but at most {MAX_TOOLS_BYTES} are allowed"
            )
        return tools

    def tools_for_template(self) -> list[dict[str, object]] | None:
        """Return the tools that the prompt describes, or None."""
        return [tool.for_template() for tool in self.tools] or None


class ToolUseFields(OfferedTools):
    """The fields of a request that calls tools."""

    tool_choice: _Choice = ToolChoice(type="auto")
    """`auto`: the model chooses, and its arguments need not follow the schema. `required`, or one by name:
    the answer is a call that follows the schema. `none`: the prompt describes no tools."""
    parallel_tool_calls: bool = True
    """An answer may have several calls; otherwise it ends with the first."""

    @field_validator("tool_choice")
    @classmethod
    def _is_there(cls, choice: ToolChoice, info: ValidationInfo) -> ToolChoice:
        if "tools" not in info.data:  # the tools are invalid themselves
            return choice
        names = [tool.function.name for tool in info.data["tools"]]
        if choice.type == "required" and not names:
            raise ValueError("a call is required, but there are no tools")
        if choice.function is not None and choice.function.name not in names:
            raise ValueError(f"{choice.function.name!r} is none of the tools")
        return choice

    def tools_for_template(self) -> list[dict[str, object]] | None:
        """Return the tools that the prompt describes, or None if no tool may be called."""
        return None if self.tool_choice.type == "none" else super().tools_for_template()
