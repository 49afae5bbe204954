"""`/v1/chat/completions`."""

import time
from collections.abc import Iterable, Iterator, Sequence

from aiohttp import web

from loong.core.request import FinishReason, TokenId
from loong.server.api.json_bodies import read_fields
from loong.server.context import SERVER, Server
from loong.server.openai.answer import AnswerShape, Json, ResponseContext, finish_fields
from loong.server.openai.completions import complete
from loong.server.openai.output import Delta
from loong.server.openai.prompts import Prompt, check_prompt_ids
from loong.server.openai.schemas import ChatFields
from loong.server.text.tokenizer import Tokenizer
from loong.server.tools.chat_parts import TOOL_CALLS, ChoiceDeltas, message_of
from loong.server.tools.parts import Part
from loong.server.tools.use import tool_use


class ChatShape(AnswerShape):
    """A turn of the assistant."""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, asked: ResponseContext, tokenizer: Tokenizer) -> None:
        super().__init__(asked, tokenizer)
        self._reported = [ChoiceDeltas() for _ in asked.choices]  # of streams with tool calls

    def whole(self, deltas: Iterable[Delta]) -> Json:
        """Return the answer, with the prompt's ids and log probabilities if the request wants them."""
        deltas = list(deltas)
        return super().whole(deltas) | self.prompt_token_ids(0) | self.prompt_logprobs(deltas[0])

    def whole_choice(self, deltas: Sequence[Delta]) -> Json:
        """Return one message with all tokens."""
        if deltas[0].parts is None:
            text = "".join(delta.text for delta in deltas)
            return self._choice(deltas) | {"message": {"role": "assistant", "content": text}}
        message = message_of(part for delta in deltas for part in delta.parts or ())
        return self._choice(deltas, has_calls=TOOL_CALLS in message) | {"message": message}

    def chunks(self, delta: Delta, num_output_tokens: int) -> Iterator[Json]:
        """Yield one event for each token. The role comes just before the first token."""
        if delta.parts is not None:
            yield from self._tool_chunks(delta, delta.parts, num_output_tokens)
            return
        if delta.index == 0:
            role = {"role": "assistant", "content": ""}
            opening: Json = {"index": delta.choice, "delta": role, "logprobs": None, "finish_reason": None}
            yield self.chunk_envelope(opening, num_output_tokens - 1) | self.prompt_token_ids(0)
        choice = self._choice([delta]) | {"delta": {"content": delta.text}}
        yield self.chunk_envelope(choice, num_output_tokens)

    def _tool_chunks(self, delta: Delta, parts: Sequence[Part], num_output_tokens: int) -> Iterator[Json]:
        """Yield one event for each new part. The last one has the token's other fields."""
        reported = self._reported[delta.choice]
        is_last = delta.finish_reason is not None
        is_needed = delta.logprobs is not None or not self.is_brief
        fields = list(reported.of(parts, is_needed=is_needed, is_last=is_last))
        for number, field in enumerate(fields, 1):
            choice: Json = {"index": delta.choice, "logprobs": None, "finish_reason": None}
            if number == len(fields):
                choice = self._choice([delta], has_calls=reported.has_calls)
            chunk = self.chunk_envelope(choice | {"delta": field}, num_output_tokens)
            yield chunk | self.prompt_token_ids(0) if "role" in field else chunk

    def _choice(self, deltas: Sequence[Delta], *, has_calls: bool = False) -> Json:
        last = deltas[-1]
        fields = {"index": last.choice, "logprobs": self._logprobs(deltas)}
        finish = finish_fields(last)
        if has_calls and last.finish_reason is FinishReason.STOP and not last.is_cut:
            finish["finish_reason"] = TOOL_CALLS
        return fields | finish | self.token_ids(deltas)

    def _logprobs(self, deltas: Sequence[Delta]) -> Json | None:
        content = []
        for delta in deltas:
            if (logprobs := delta.logprobs) is not None:
                top = [self._token(token_id, logprob) for token_id, logprob in logprobs.top]
                content.append(self._token(delta.token_id, logprobs.chosen) | {"top_logprobs": top})
        return {"content": content} if content else None

    def _token(self, token_id: TokenId, logprob: float) -> Json:
        token = self.token_name(token_id)
        return {"token": token, "logprob": logprob, "bytes": list(self.tokenizer.token_bytes(token_id))}


async def chat_completions(http: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    arrived_at = time.monotonic()
    server = http.app[SERVER]
    fields = await read_fields(http, ChatFields)
    server.check_model(fields.model)
    prompt = await prompt_of_chat(fields, server)
    return await complete(http, fields, [prompt], ChatShape, arrived_at)


async def prompt_of_chat(fields: ChatFields, server: Server) -> Prompt:
    """Return the prompt of a conversation, with the tools that its answer may call.

    Raises a 400 if the tokenizer has tokens that the model does not have, and the prompt holds one.
    """
    tools = tool_use(fields, server.call_format)
    ending = "" if tools is None else tools.prompt_ending
    token_ids = await server.chat_prompts.token_ids(fields, ending)
    await check_prompt_ids("the prompt", token_ids, server.engine.limits.vocab_size, "messages")
    return Prompt("the prompt", token_ids, tools=tools)
