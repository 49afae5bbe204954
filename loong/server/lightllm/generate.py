"""`/generate` and `/generate_stream`: completions with other field names."""

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from aiohttp import web

from loong.core.errors import InvalidRequestError
from loong.server.api.errors import ApiError, as_api_error
from loong.server.api.json_bodies import read_fields
from loong.server.api.sse import BARE_STREAM
from loong.server.context import SERVER
from loong.server.lightllm.fields import GenerateFields
from loong.server.openai.answer import AnswerShape, Json, ResponseContext
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
    whole_object = "generated"
    chunk_object = "generated"
    stream_format = BARE_STREAM

    def __init__(self, asked: ResponseContext, tokenizer: Tokenizer) -> None:
        super().__init__(asked, tokenizer)
        self.is_brief = False  # each event has the id of its token

    def whole(self, deltas: Iterable[Delta]) -> Json:
        """Return the answer. With several choices its fields are lists, except the texts."""
        choices = [self.whole_choice(reported) for reported in self.by_choice(deltas)]
        columns: dict[str, list[object]] = {name: [choice[name] for choice in choices] for name in choices[0]}
        fields: Json = {"prompt_tokens": self.asked.num_prompt_tokens}
        if len(choices) > 1:
            return columns | fields
        return choices[0] | fields | {"generated_text": columns["generated_text"]}

    def whole_choice(self, deltas: Sequence[Delta]) -> Json:
        """Return one choice, with its tokens if the request wants details."""
        reason = deltas[-1].finish_reason
        fields: Json = {
            "generated_text": "".join(delta.text for delta in deltas),
            "count_output_tokens": len(deltas),
            "finish_reason": reason and reason.value,
        }
        has_details = deltas[0].logprobs is not None
        return fields | ({"tokens": list(map(self._token, deltas))} if has_details else {})

    def chunks(self, delta: Delta, num_output_tokens: int) -> Iterator[Json]:  # noqa: ARG002
        """Yield one event for each token."""
        yield {
            "token": self._token(delta),
            "generated_text": None,
            "finished": delta.finish_reason is not None,
            "finish_reason": delta.finish_reason and delta.finish_reason.value,
            "details": None,
        }

    def _token(self, delta: Delta) -> Json:
        return {
            "id": delta.token_id,
            "text": delta.text,
            "logprob": delta.logprobs and delta.logprobs.chosen,
            "special": self.tokenizer.is_silent(delta.token_id, skip_special_tokens=True),
            "count_output_tokens": delta.index + 1,
            "prompt_tokens": self.asked.num_prompt_tokens,
        }


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
