"""`/generate` and `/generate_stream`: completions with other field names."""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from aiohttp import web
from msgspec import UNSET

from loong.core.errors import InvalidRequestError
from loong.server.answers.base import FINISH_REASONS
from loong.server.answers.lightllm import Generated, GeneratedEvent, GeneratedToken
from loong.server.api.errors import ApiError, as_api_error
from loong.server.api.json_bodies import read_fields
from loong.server.api.sse import BARE_STREAM
from loong.server.context import SERVER
from loong.server.lightllm.fields import GenerateFields
from loong.server.openai.answer import AnswerShape, ResponseContext, finish_reason_of
from loong.server.openai.completions import complete
from loong.server.openai.output import Delta
from loong.server.openai.prompts import completion_prompts
from loong.server.text.tokenizer import Tokenizer

_NAMES: Mapping[str, str] = {  # field names of completions, and LightLLM's
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "guided_regex": "regular_constraint",
}
_NAME = re.compile(rf"\b({'|'.join(_NAMES)})\b")


class GenerateShape(AnswerShape):
    """An answer of text and token counts, without an envelope."""

    id_prefix = "gen"
    stream_format = BARE_STREAM

    def __init__(self, asked: ResponseContext, tokenizer: Tokenizer) -> None:
        super().__init__(asked, tokenizer)
        self.is_brief = False  # each event has the id of its token

    def whole(self, deltas: Sequence[Delta]) -> Generated:
        """Return the answer. With several choices its fields are lists, as the texts always are."""
        by_choice = self.by_choice(deltas)
        reasons = [FINISH_REASONS[end] for *_, last in by_choice if (end := last.finish_reason) is not None]
        counts = list(map(len, by_choice))
        tokens = [list(map(self._token, reported)) for reported in by_choice]
        has_details, is_alone = deltas[0].logprobs is not None, len(by_choice) == 1
        return Generated(
            ["".join(delta.text for delta in reported) for reported in by_choice],
            counts[0] if is_alone else counts,
            reasons[0] if is_alone else reasons,
            self.asked.num_prompt_tokens,
            self.num_cached_tokens,
            UNSET if not has_details else [*tokens[0]] if is_alone else [*tokens],
        )

    def chunks(self, delta: Delta, num_output_tokens: int) -> Iterator[GeneratedEvent]:  # noqa: ARG002
        """Yield one event for each token."""
        reason = finish_reason_of(delta)
        yield GeneratedEvent(token=self._token(delta), finished=reason is not None, finish_reason=reason)

    def _token(self, delta: Delta) -> GeneratedToken:
        return GeneratedToken(
            delta.token_id,
            delta.text,
            None if delta.logprobs is None else delta.logprobs.chosen,
            self.tokenizer.is_silent(delta.token_id, skip_special_tokens=True),
            delta.index + 1,
            self.asked.num_prompt_tokens,
            self.num_cached_tokens,
        )


async def generate(http: web.Request) -> web.StreamResponse:
    """Answer with the whole continuation of a text."""
    return await _generate(http, is_streamed=False)


async def generate_stream(http: web.Request) -> web.StreamResponse:
    """Answer with a stream that has one event for each token."""
    return await _generate(http, is_streamed=True)


async def _generate(http: web.Request, *, is_streamed: bool) -> web.StreamResponse:
    arrived_at, server = time.monotonic(), http.app[SERVER]
    given = await read_fields(http, GenerateFields)
    with _lightllms_names():
        fields = given.as_completion(is_streamed=is_streamed)
        prompts = await completion_prompts(fields, server.tokenizer, server.engine.limits.vocab_size)
        return await complete(http, fields, prompts, GenerateShape, arrived_at)


@contextmanager
def _lightllms_names() -> Iterator[None]:
    """Rename the fields in errors raised inside the context to LightLLM's names."""
    try:
        yield
    except (ApiError, InvalidRequestError) as error:
        reported = as_api_error(error)
        message = _NAME.sub(lambda found: _NAMES[found[1]], reported.message).replace(
            "prompt must", "inputs must"
        )
        is_inputs = reported.param in ("prompt", "inputs")
        param = reported.param and ("inputs" if is_inputs else "parameters")
        raise ApiError(reported.status, message, reported.code, param, reported.headers) from error
