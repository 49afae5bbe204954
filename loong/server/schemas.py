"""What clients may send: the OpenAI API's fields, and those that vLLM adds; defaults and meanings are vLLM's.

A field that is null counts as absent. What is not listed is refused by name, never ignored, except a few
well-known fields that change nothing about the answer.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import msgspec
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, from_json

from loong.core.request import MAX_LOGPROBS
from loong.server.errors import ApiError, bad_request

MAX_PROMPTS = 256  # in one request
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256  # characters
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIASES = 1024
MAX_USER_LENGTH = 256  # characters
MAX_MESSAGES = 4096

_HARMLESS = frozenset({"store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"})
_NEUTRAL: dict[str, object] = {  # fields that are not supported, and the value that asks for nothing
    "n": 1,
    "best_of": 1,
    "suffix": "",
    "priority": 0,
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
}


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _as_parts(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
StopStrings = Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS), BeforeValidator(_as_list)]


class Schema(BaseModel):
    """A JSON object in which each field has its own type, and no other field is allowed."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(Schema):
    """What a stream tells besides text: token counts at its end, or with every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False  # padding against traffic analysis; there is none to include


class JsonSchemaFormat(Schema):
    """A JSON schema, and what to call it."""

    name: Annotated[str, Field(max_length=256)] = ""
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None  # answers are held to it in any case


class ResponseFormat(Schema):
    """What an answer is held to: nothing, to be a JSON object, or a JSON schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _names_a_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with the type json_schema, and with no other")
        return self

    @property
    def schema_text(self) -> str | None:
        """The JSON schema that the answer is held to, as text; None for none."""
        if self.json_schema is not None:
            return msgspec.json.encode(self.json_schema.schema_).decode()
        return '{"type":"object"}' if self.type == "json_object" else None


class GenerationFields(Schema, ABC):
    """What both kinds of completion have in common."""

    prompt_field: ClassVar[str]
    default_max_tokens: ClassVar[int | None]  # None: whatever fits

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIASES)] = {}  # by token id
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: StopStrings = []
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS)] = []
    ignore_eos: bool = False
    response_format: ResponseFormat = ResponseFormat()
    user: Annotated[str, Field(max_length=MAX_USER_LENGTH)] = ""  # between whom `--fairness user` shares
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False

    @field_validator("stream_options")
    @classmethod
    def _is_for_streams(cls, options: StreamOptions, info: ValidationInfo) -> StreamOptions:
        if not info.data.get("stream"):
            raise ValueError("stream_options are for requests with stream set to true")
        return options

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens to tell at each position; None for no logprobs at all."""


class CompletionFields(GenerationFields):
    """The body of `/v1/completions`."""

    prompt_field = "prompt"
    default_max_tokens = 16

    prompt: Any  # checked by `prompts.completion_prompt`: a million ids are not worth a schema each
    add_special_tokens: bool = True
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @field_validator("logprobs")
    @classmethod
    def _has_none_of_the_prompt(cls, logprobs: int | None, info: ValidationInfo) -> int | None:
        if logprobs is not None and info.data.get("echo"):
            raise ValueError("logprobs of an echoed prompt are not supported: leave out logprobs or echo")
        return logprobs

    @property
    def num_logprobs(self) -> int | None:
        """As asked."""
        return self.logprobs


class TextPart(Schema):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class Message(Schema):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextPart], BeforeValidator(_as_parts)]
    name: str | None = None

    def for_template(self) -> dict[str, object]:
        """The message as chat templates expect it, its content as one string."""
        text = "\n".join(part.text for part in self.content)
        return {**self.model_dump(exclude_none=True), "content": text}


class ChatFields(GenerationFields):
    """The body of `/v1/chat/completions`."""

    prompt_field = "messages"
    default_max_tokens = None

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0

    @property
    def num_logprobs(self) -> int | None:
        """As asked, if asked at all; naming a number without asking is an error."""
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
        return self.top_logprobs if self.logprobs else None


class TokenizeFields(Schema):
    """The body of `/tokenize`: a text, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool | None = None  # by default yes for a text, no for a chat
    chat_template_kwargs: dict[str, Any] = {}
    return_token_strs: bool = False


class DetokenizeFields(Schema):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: list[int]


Fields = TypeVar("Fields", bound=Schema)


def read_json(body: bytes) -> object:
    """The value that a body writes; raise a 400 if it is no JSON."""
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise bad_request(f"the body is not valid JSON: {error}", None, "invalid_json") from error


def check(content: object, schema: type[Fields]) -> Fields:
    """Take what a body says as `schema`; raise a 400 that names the first field at fault."""
    if not isinstance(content, dict):
        raise bad_request(f"the body must be a JSON object, but is {type(content).__name__}", None)
    try:
        return schema.model_validate(_asked_for(content, schema))
    except ValidationError as error:
        raise _name_field(error.errors(include_url=False, include_context=False)[0]) from error


def _asked_for(content: Mapping[str, object], schema: type[Schema]) -> dict[str, object]:
    """The fields that ask for something."""
    return {
        name: value
        for name, value in content.items()
        if value is not None
        and (name in schema.model_fields or (name not in _HARMLESS and value != _NEUTRAL.get(name)))
    }


def _name_field(error: ErrorDetails) -> ApiError:
    names = [str(part) for part in error["loc"]]
    field = names[0] if names else None
    path = ".".join(names)
    if error["type"] != "extra_forbidden":
        return bad_request(f"{path}: {error['msg']}", field)
    but = f" (only {_NEUTRAL[path]!r} is)" if path in _NEUTRAL else ""
    return bad_request(f"{path} is not supported{but}", field, "unsupported_parameter")
