"""The body of `/v1/responses`."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from loong.core.limits import NUM_SEEDS
from loong.server.api.parsing import check
from loong.server.api.schema_base import Schema, within
from loong.server.openai.schemas import MAX_USER_LENGTH, CacheSalt, ChatFields, SLOFields
from loong.server.responses.input_items import Items, Turn, turns_of
from loong.server.structured.free_json import FreeObject
from loong.server.tools.fields import MAX_TOOLS, Parameters, ToolName

MAX_METADATA = 16  # pairs
_Name = Annotated[str, Field(max_length=64)]
_Value = Annotated[str, Field(max_length=512)]


def _only(allowed: object, why: str) -> AfterValidator:
    """Refuse any value except `allowed`, with the reason `why`."""

    def check(value: object) -> object:
        if value != allowed:
            raise ValueError(why)
        return value

    return AfterValidator(check)


class ResponseTool(Schema):
    """A function that the model may call; the client runs it."""

    type: Literal["function"]
    name: ToolName
    description: str = ""
    parameters: Parameters = {}
    """The JSON schema of its arguments. Without one there are none."""
    strict: bool | None = None
    """Arguments of a forced call always follow the schema, others need not."""

    def as_given(self) -> dict[str, object]:
        """Return the tool as answers repeat it."""
        return self.model_dump() | {"strict": bool(self.strict)}

    def as_chat(self) -> dict[str, object]:
        """Return the tool as chats have it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


class ResponseToolChoice(Schema):
    """The choice of tools: the model chooses, none, at least one, or one by name."""

    type: Literal["none", "auto", "required", "function"]
    name: ToolName | None = None

    @model_validator(mode="after")
    def _names_a_function(self) -> Self:
        if (self.type == "function") != (self.name is not None):
            raise ValueError("name goes with the type function, and with no other")
        return self

    def as_chat(self) -> object:
        """Return the choice as chats have it."""
        return self.type if self.name is None else {"type": "function", "function": {"name": self.name}}

    def as_given(self) -> str | dict[str, str]:
        """Return the choice as answers repeat it."""
        return self.type if self.name is None else {"type": "function", "name": self.name}


class NamedResponseTool(Schema):
    """A tool by its name."""

    type: Literal["function"]
    name: ToolName


def _as_choice(value: object) -> object:
    return {"type": value} if isinstance(value, str) else value


_Choice = Annotated[
    ResponseToolChoice, BeforeValidator(_as_choice, Literal["none", "auto", "required"] | NamedResponseTool)
]


class TextFormat(Schema):
    """The format of the text: free, a JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Annotated[str, Field(max_length=256)] | None = None
    description: str | None = None
    schema_: Annotated[FreeObject | None, Field(alias="schema")] = None
    """Of the type `json_schema`."""
    strict: bool | None = None
    """Texts always follow the schema."""

    @model_validator(mode="after")
    def _has_a_schema(self) -> Self:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("schema goes with the type json_schema, and with no other")
        return self

    def as_given(self) -> dict[str, object]:
        """Return the format as answers repeat it."""
        return self.model_dump(by_alias=True, exclude_none=True)

    def as_chat(self) -> dict[str, object]:
        """Return the format as chats have it."""
        if self.schema_ is None:
            return {"type": self.type}
        return {"type": self.type, "json_schema": {"name": self.name or "", "schema": self.schema_}}


class TextFields(Schema):
    """Options of the text."""

    format: TextFormat = TextFormat()
    verbosity: Annotated[str, _only("medium", "only medium is supported")] = "medium"


class ResponseStreamOptions(Schema):
    """Options of a stream besides its events: none exist."""

    include_obfuscation: bool = False
    """Padding against traffic analysis; there is none to include."""


class ResponseFields(Schema):
    """The body of `/v1/responses`. Nothing is stored, so each request has the whole conversation."""

    model: str | None = None
    """The name in `/v1/models`, or nothing."""
    input: Items
    """A text of the user, or the items of the conversation: messages, calls and their results."""
    instructions: str | None = None
    """A system turn before all others."""
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS)] = []
    """The functions that the model may call."""
    tool_choice: _Choice = ResponseToolChoice(type="auto")
    """As in chats."""
    parallel_tool_calls: bool = True
    """An answer may have several calls; otherwise it ends with the first."""
    text: TextFields = TextFields()
    """The format of the text."""
    max_output_tokens: Annotated[int, within("max_tokens")] | None = None
    """The most tokens to produce; by default all that fit."""
    temperature: Annotated[float, within("temperature")] = 1.0
    """0 takes the likeliest token."""
    top_p: Annotated[float, within("top_p", least=0)] = 1.0
    """Sample among the likeliest tokens that together have this probability; 0 takes the likeliest token."""
    seed: Annotated[int, within("seed", least=-NUM_SEEDS)] | None = None
    """The seed of all samples. Not in the OpenAI API."""
    priority: Annotated[int, within("priority")] = 0
    """As in chats. Not in the OpenAI API."""
    slo: SLOFields | None = None
    """As in chats. Not in the OpenAI API."""
    cache_salt: CacheSalt | None = None
    """As in chats. Not in the OpenAI API."""
    use_prefix_cache: bool = True
    """As in chats. Not in the OpenAI API."""
    user: Annotated[str, Field(max_length=MAX_USER_LENGTH)] = ""
    """The user of the request."""
    metadata: Annotated[dict[_Name, _Value], Field(max_length=MAX_METADATA)] = {}
    """Repeated in the answer."""
    stream: bool = False
    """Send the answer as it grows, as typed events."""
    stream_options: ResponseStreamOptions = ResponseStreamOptions()
    """For streams only."""
    include: list[Literal["reasoning.encrypted_content"]] = []
    """No effect, because there is no reasoning."""
    store: Annotated[bool, _only(False, "nothing is stored; leave it out, or send false")] = False
    """Only false: no answer can be retrieved or continued later."""
    background: Annotated[bool, _only(False, "there are no answers in the background")] = False
    """Only false."""
    truncation: Annotated[str, _only("disabled", "only disabled is supported")] = "disabled"
    """Only `disabled`: a conversation that is too long is refused."""

    def as_chat(self) -> ChatFields:
        """Return the request as a chat. Raises a 400 in terms of chats where chats allow less."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": self._turns()[0],
            "tools": [tool.as_chat() for tool in self.tools],
            "tool_choice": self.tool_choice.as_chat(),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self.text.format.as_chat(),
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "priority": self.priority,
            "slo": None if self.slo is None else self.slo.model_dump(),
            "cache_salt": self.cache_salt,
            "use_prefix_cache": self.use_prefix_cache,
            "user": self.user,
            "stream": self.stream,
        }
        return check(body, ChatFields)

    def field_of_turn(self, index: int) -> str:
        """Return the name of the field that a turn of the chat comes from."""
        return self._turns()[1][index]

    def _turns(self) -> tuple[list[Turn], list[str]]:
        """Return the turns of the chat, and where each comes from.

        Instructions come first, joined with a system turn at the beginning.
        """
        turns, indices = turns_of(self.input)
        names = [f"input.{index}" for index in indices]
        if self.instructions is None:
            return turns, names
        first = turns[0] if turns else None
        if first is not None and first["role"] in ("system", "developer"):
            return [{**first, "content": f"{self.instructions}\n\n{first['content']}"}, *turns[1:]], names
        return [{"role": "system", "content": self.instructions}, *turns], ["instructions", *names]
