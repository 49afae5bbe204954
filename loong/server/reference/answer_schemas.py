"""Schemas of answers. Answers are not built from them, which would be slow; tests compare them."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

FinishReason = Literal["stop", "length", "abort"]
ChatFinishReason = Literal["stop", "length", "abort", "tool_calls"]


class Answer(BaseModel):
    """A JSON object with these fields and no others. Fields with a default may be missing."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class ErrorFields(Answer):
    """The error."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    """The field at fault."""
    code: str
    """The kind of the error, as in `loong:request_refused_total`."""


class Error(Answer):
    """Every answer without success, or an event in a stream that has begun."""

    error: ErrorFields


class Usage(Answer):
    """Token counts, with each prompt counted once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(Answer):
    """Lists with an entry for each token. The first token of an echoed prompt has null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    """The likeliest tokens and the chosen one."""
    text_offset: list[int]
    """The offset of the token's text in the answer, in characters."""


class RankedLogprob(Answer):
    """The log probability of a token at a position of the prompt. The likeliest token has rank 1."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, RankedLogprob] | None]


class CompletionChoice(Answer):
    """One choice of one prompt, or a piece of it in a stream."""

    index: int
    """Counts the choices of the first prompt, then those of the next."""
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    """The stop string or token of the request that ended the answer."""
    token_ids: list[int] = []
    prompt_token_ids: list[int] = []
    """In a stream, with the first piece."""
    prompt_logprobs: PromptLogprobs = []
    """By token id, the prompt's own token first; null for the first token."""


class Completion(Answer):
    """A completion, or a chunk of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TokenLogprob(Answer):
    """A token and its log probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    """The log probabilities of the chosen token and of the likeliest ones."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Answer):
    """An entry for each token."""

    content: list[ChosenLogprob]


class CalledFunction(Answer):
    """The name and the arguments of a call."""

    name: str
    arguments: str
    """JSON as the model wrote it. In a forced call it follows the schema."""


class ToolCall(Answer):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Answer):
    """The assistant's turn."""

    role: Literal["assistant"]
    content: str | None
    """Null if there are calls and no text."""
    tool_calls: list[ToolCall] = []


class ChatChoice(Answer):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: str | int | None
    """The stop string or token of the request that ended the answer."""
    token_ids: list[int] = []


class ChatCompletion(Answer):
    """A turn of the assistant."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] = []
    prompt_logprobs: PromptLogprobs = []
    """See completions."""


class FunctionDelta(Answer):
    """The name of a function, or a piece of its arguments."""

    name: str | None = None
    arguments: str


class ToolCallDelta(Answer):
    """The news of a call: its id and name first, then its arguments."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class MessageDelta(Answer):
    """The news of the assistant's turn."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] = []


class ChatChunkChoice(Answer):
    """A piece of one choice. The first piece has the role."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] = []


class ChatCompletionChunk(Answer):
    """An event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] = []


class Model(Answer):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    """The longest prompt and answer together, in tokens."""


class ModelList(Answer):
    """All models, which is one."""

    object: Literal["list"]
    data: list[Model]


class Tokenized(Answer):
    """Token ids of a text or a chat."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None
    """The vocabulary's piece of each token, if the request wants them."""


class Detokenized(Answer):
    """The text of token ids."""

    prompt: str


class Status(Answer):
    """The outcome of a command."""

    status: str


class HealthStatus(Answer):
    """The health of a server that serves. One that does not answers 503 with the reason."""

    status: Literal["ok", "degraded"]
    """degraded: some instances do not serve, or none could start again."""
    message: str = ""
    """The instances that do not serve, and what else is wrong, in words."""
    instances: dict[str, Literal["restarting", "silent", "quarantined", "draining"]] = {}
    """The instances that do not serve, and why. draining: an operator removes it."""


class Version(Answer):
    """The version of loong."""

    version: str


class Load(Answer):
    """Requests in flight."""

    server_load: int


class Trace(BaseModel):
    """A trace in Chrome's format."""

    model_config = ConfigDict(extra="allow")

    traceEvents: list[dict[str, Any]]  # noqa: N815 - Chrome's name


class TraceFile(Answer):
    """The path of a trace on the server."""

    trace: str


class Instance(Answer):
    """An instance, and the tokens of KV that it holds and can hold."""

    id: int
    state: Literal["serving", "draining", "starting", "lost", "quarantined"]
    """draining: takes nothing new, and leaves once empty. lost: is started again. quarantined: is not."""
    kv_used: int
    kv_capacity: int


class Instances(Answer):
    """The instances of a server."""

    num_instances: int
    """The number that is asked for: that of `loong serve`, or of the last change."""
    max_instances: int
    """The most that there can be."""
    is_done: bool
    """True if exactly these serve."""
    instances: list[Instance]


class InjectedFault(Answer):
    """The fault, and the instance that has it."""

    fault: Literal["kill", "pause"]
    instance: int


class Document(BaseModel):
    """An OpenAPI 3.1 document."""

    model_config = ConfigDict(extra="allow")

    openapi: str
