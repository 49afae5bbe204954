"""The wire formats of serving systems: the request, and the events of its stream."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

import msgspec

from loong.workloads.metrics.record import TokenUsage
from loong.workloads.request import WorkloadRequest

MAX_ERROR_CHARACTERS = 300
# The fields of a body that its request's shape decides, or that time its tokens.
FIELDS_OF_THE_LOAD = frozenset(
    (
        *("model", "prompt", "max_tokens", "max_new_tokens", "stream", "stream_options", "user", "n"),
        "return_token_ids",
    )
)


class ServerApi(Enum):
    """An API: OpenAI's completions, which most servers have, or LightLLM's own."""

    OPENAI = "openai"
    LIGHTLLM = "lightllm"


@dataclass(slots=True)
class ServerResponse:
    """A streamed answer so far. `request_id` and `token_ids` are the server's, as far as it says."""

    token_times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    usage: TokenUsage | None = None
    error: str | None = None
    is_done: bool = False
    request_id: str = ""

    @property
    def is_over(self) -> bool:
        """Return whether the rest of the stream does not matter."""
        return self.is_done or self.error is not None

    def fail(self, reason: str) -> None:
        """Record an error, unless the answer was over."""
        if not self.is_over:
            self.error = reason[:MAX_ERROR_CHARACTERS]

    def verdict(self) -> str | None:
        """Return the error, None if there is none."""
        if self.error is not None:
            return self.error
        if not self.is_done:
            return "the stream ended before its last event"
        return None if self.token_times else "the answer has no tokens"


Body: TypeAlias = dict[str, object]


@dataclass(frozen=True, slots=True)
class Wire:
    """The format of a request, and the function that reads an event of its stream and its time."""

    path: str
    body: Callable[[str, WorkloadRequest, list[int], Mapping[str, object]], Body]
    take: Callable[[ServerResponse, str, float], None]


def wire_of(backend: ServerApi) -> Wire:
    """Return the wire format of a server of that kind."""
    return _WIRES[backend]


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _PromptDetails | None = None


class _Error(msgspec.Struct):
    message: str = "no message"


class _Event(msgspec.Struct):
    id: str | None = None
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | str | None = None


_decode_event = msgspec.json.Decoder(_Event).decode


def _openai_body(
    model: str, request: WorkloadRequest, prompt: list[int], extra: Mapping[str, object]
) -> Body:
    body: Body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": request.num_output_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.shape.is_followed:
        body["return_token_ids"] = True
    if request.shape.user:
        body["user"] = request.shape.user
    return {**body, **extra}


def _take_openai(answer: ServerResponse, event: str, now: float) -> None:
    if event == "[DONE]":
        answer.is_done = True
        return
    chunk = _decode_event(event)
    answer.request_id = answer.request_id or chunk.id or ""
    if chunk.error is not None:
        reason = chunk.error if isinstance(chunk.error, str) else chunk.error.message
        answer.fail(f"error in the stream: {reason}")
    if chunk.usage is not None:
        details = chunk.usage.prompt_tokens_details
        num_cached_tokens = None if details is None else details.cached_tokens
        answer.usage = TokenUsage(chunk.usage.prompt_tokens, chunk.usage.completion_tokens, num_cached_tokens)
    for choice in chunk.choices:
        if choice.token_ids:
            answer.token_ids += choice.token_ids
    if any(_has_output(answer, choice) for choice in chunk.choices):
        answer.token_times.append(now)


def _has_output(answer: ServerResponse, choice: _Choice) -> bool:
    """Return whether an event carries a token.

    An empty text may be half a character. Only an empty last event after output carries no token.
    """
    return choice.text != "" or choice.finish_reason is None or not answer.token_times


class _LightToken(msgspec.Struct):
    id: int | None = None
    prompt_tokens: int = 0
    count_output_tokens: int = 0


class _LightEvent(msgspec.Struct):
    token: _LightToken
    finished: bool = False
    finish_reason: str | None = None


_decode_light_event = msgspec.json.Decoder(_LightEvent).decode


def _lightllm_body(
    _model: str, request: WorkloadRequest, prompt: list[int], extra: Mapping[str, object]
) -> Body:
    parameters = {"max_new_tokens": request.num_output_tokens, "ignore_eos": True, "do_sample": False}
    return {"inputs": prompt, "parameters": {**parameters, **extra}}


def _take_lightllm(answer: ServerResponse, event: str, now: float) -> None:
    """Take an event, which is a token; the last one is `finished`, and nothing comes after it."""
    chunk = _decode_light_event(event)
    answer.token_times.append(now)
    if chunk.token.id is not None:
        answer.token_ids.append(chunk.token.id)
    counted = chunk.token.count_output_tokens or len(answer.token_times)
    if chunk.token.prompt_tokens:
        answer.usage = TokenUsage(chunk.token.prompt_tokens, counted)
    if chunk.finished and chunk.finish_reason in ("abort", "aborted"):
        answer.fail("error in the stream: the server gave up the request")
    answer.is_done = chunk.finished


_WIRES: Mapping[ServerApi, Wire] = {
    ServerApi.OPENAI: Wire("/v1/completions", _openai_body, _take_openai),
    ServerApi.LIGHTLLM: Wire("/generate_stream", _lightllm_body, _take_lightllm),
}
