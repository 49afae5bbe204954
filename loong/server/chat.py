"""`/v1/chat/completions`."""

import time
from collections.abc import Iterable, Iterator, Sequence

from aiohttp import web

from loong.core.request import TokenId
from loong.server.answer import AnswerShape, Json, finish_fields
from loong.server.completions import complete
from loong.server.context import SERVER
from loong.server.output import Delta
from loong.server.prompts import Prompt, chat_prompt
from loong.server.schemas import ChatFields
from loong.server.wire import read_fields


class ChatShape(AnswerShape):
    """A turn of the assistant."""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole(self, deltas: Iterable[Delta]) -> Json:
        """With what was asked for of the one prompt: its ids, and log probabilities."""
        deltas = list(deltas)
        return super().whole(deltas) | self.prompt_token_ids(0) | self.prompt_logprobs(deltas[0])

    def whole_choice(self, deltas: Sequence[Delta]) -> Json:
        """All tokens in one message."""
        text = "".join(delta.text for delta in deltas)
        return self._choice(deltas) | {"message": {"role": "assistant", "content": text}}

    def chunks(self, delta: Delta, num_output_tokens: int) -> Iterator[Json]:
        """One event a token, and the role before the first: not earlier, so that it waits for a token."""
        if delta.index == 0:
            role = {"role": "assistant", "content": ""}
            opening: Json = {"index": delta.choice, "delta": role, "logprobs": None, "finish_reason": None}
            yield self.chunk_envelope(opening, num_output_tokens - 1) | self.prompt_token_ids(0)
        choice = self._choice([delta]) | {"delta": {"content": delta.text}}
        yield self.chunk_envelope(choice, num_output_tokens)

    def _choice(self, deltas: Sequence[Delta]) -> Json:
        fields = {"index": deltas[-1].choice, "logprobs": self._logprobs(deltas)}
        return fields | finish_fields(deltas[-1]) | self.token_ids(deltas)

    def _logprobs(self, deltas: Sequence[Delta]) -> Json | None:
        content = []
        for delta in deltas:
            if (logprobs := delta.logprobs) is not None:
                top = [self._token(token_id, logprob) for token_id, logprob in logprobs.top]
                content.append(self._token(delta.token_id, logprobs.chosen) | {"top_logprobs": top})
        return {"content": content} if content else None

    def _token(self, token_id: TokenId, logprob: float) -> Json:
        token = self.tokenizer.token_text(token_id)
        return {"token": token, "logprob": logprob, "bytes": list(self.tokenizer.token_bytes(token_id))}


async def chat_completions(http: web.Request) -> web.StreamResponse:
    """Continue a conversation."""
    arrived_at = time.monotonic()
    server = http.app[SERVER]
    fields = await read_fields(http, ChatFields)
    server.check_model(fields.model)
    prompt = Prompt("the prompt", await chat_prompt(fields, server.tokenizer, server.ignored_keys))
    return await complete(http, fields, [prompt], ChatShape, arrived_at)
