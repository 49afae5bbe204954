"""`/v1/completions`, and the way that both kinds of completion take from a request to its answer."""

import time
from collections.abc import Iterator, Sequence
from uuid import uuid4

from aiohttp import web

from loong.core.request import Request, TokenId
from loong.server.answer import AnswerShape, Asked, Json, finish_fields, send_stream, send_whole
from loong.server.context import SERVER
from loong.server.generation import generate
from loong.server.output import Delta, OutputOptions
from loong.server.parameters import max_output_tokens, sampling_params
from loong.server.prompts import check_token_ids, completion_prompt
from loong.server.schemas import CompletionFields, GenerationFields
from loong.server.wire import read_fields


class CompletionShape(AnswerShape):
    """A text completion."""

    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def whole(self, deltas: Sequence[Delta]) -> Json:
        """All tokens in one choice."""
        choice = self._choice(deltas) | self.prompt_token_ids()
        return self.envelope(self.whole_object, [choice]) | {"usage": self.usage(len(deltas))}

    def chunks(self, delta: Delta) -> Iterator[Json]:
        """One event a token."""
        choice = self._choice([delta]) | (self.prompt_token_ids() if delta.index == 0 else {})
        yield self.chunk_envelope(choice, delta.index + 1)

    def _choice(self, deltas: Sequence[Delta]) -> Json:
        text = "".join(delta.text for delta in deltas)
        fields = {"index": 0, "text": text, "logprobs": self._logprobs(deltas)}
        return fields | finish_fields(deltas[-1]) | self.token_ids(deltas)

    def _logprobs(self, deltas: Sequence[Delta]) -> Json | None:
        told = [(delta, delta.logprobs) for delta in deltas if delta.logprobs is not None]
        if not told:
            return None
        name = self.tokenizer.token_text
        return {
            "tokens": [name(delta.token_id) for delta, _ in told],
            "token_logprobs": [logprobs.chosen for _, logprobs in told],
            "top_logprobs": [{name(i): logprob for i, logprob in logprobs.top} for _, logprobs in told],
            "text_offset": [delta.text_offset for delta, _ in told],
        }


async def completions(http: web.Request) -> web.StreamResponse:
    """Complete a text."""
    arrived_at = time.monotonic()
    server = http.app[SERVER]
    fields = await read_fields(http, CompletionFields)
    server.check_model(fields.model)
    prompt = await completion_prompt(fields, server.tokenizer)
    check_token_ids("prompt", prompt, server.engine.limits.vocab_size)
    return await complete(http, fields, prompt, CompletionShape, arrived_at)


async def complete(
    http: web.Request,
    fields: GenerationFields,
    prompt: Sequence[TokenId],
    shape_type: type[AnswerShape],
    arrived_at: float,
) -> web.StreamResponse:
    """Check, admit and run a request, and send its answer in the endpoint's shape."""
    server = http.app[SERVER]
    limits = server.engine.limits
    params = sampling_params(
        fields,
        max_tokens=max_output_tokens(fields, len(prompt), limits),
        eos_token_ids=server.tokenizer.eos_token_ids,
        vocab_size=limits.vocab_size,
    )
    request_id = f"{shape_type.id_prefix}-{uuid4().hex}"
    request = Request(request_id, tuple(prompt), params, arrival_time=0.0, user=fields.user)
    model = server.settings.served_model_name
    asked = Asked(request, model, int(time.time()), fields.return_token_ids, fields.stream_options)
    shape = shape_type(asked, server.tokenizer)
    options = OutputOptions(tuple(fields.stop), tuple(fields.stop_token_ids), fields.skip_special_tokens)
    with server.admission.admit(request.request_id, len(prompt)):
        deltas = generate(server, request, options, arrived_at)
        if fields.stream:
            return await send_stream(http, server, shape, deltas)
        return await send_whole(shape, deltas)
