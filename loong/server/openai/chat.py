"""`/v1/chat/completions`."""

import time
from collections.abc import Iterator, Sequence

from aiohttp import web
from msgspec import UNSET, UnsetType

from loong.core.request import FinishReason, TokenId
from loong.server.answers.chats import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatFinishReason,
    ChatLogprobs,
    ChosenLogprob,
    MessageDelta,
    TokenLogprob,
)
from loong.server.answers.completions import Usage
from loong.server.api.json_bodies import read_fields
from loong.server.api.sse import event_of
from loong.server.context import SERVER, Server
from loong.server.openai.answer import AnswerShape, ResponseContext, finish_reason_of
from loong.server.openai.completions import complete
from loong.server.openai.output import Delta
from loong.server.openai.prompts import Prompt, check_prompt_ids
from loong.server.openai.schemas import ChatFields
from loong.server.text.tokenizer import Tokenizer
from loong.server.tools.chat_parts import ChoiceDeltas, message_of
from loong.server.tools.parts import Part
from loong.server.tools.use import tool_use


class ChatShape(AnswerShape):
    """A turn of the assistant."""

    id_prefix = "chatcmpl"

    def __init__(self, asked: ResponseContext, tokenizer: Tokenizer) -> None:
        super().__init__(asked, tokenizer)
        self._reported = [ChoiceDeltas() for _ in asked.choices]  # of streams with tool calls
        self._is_open = False

    def whole(self, deltas: Sequence[Delta]) -> ChatCompletion:
        """Return the answer, with the prompt's ids and log probabilities if the request wants them."""
        asked = self.asked
        return ChatCompletion(
            asked.answer_id,
            asked.created,
            asked.model,
            [self._whole_choice(reported) for reported in self.by_choice(deltas)],
            self.usage(len(deltas)),
            self.prompt_token_ids(0),
            self.prompt_logprobs(deltas[0]),
        )

    def _whole_choice(self, deltas: Sequence[Delta]) -> ChatChoice:
        """Return one message with all tokens."""
        last = deltas[-1]
        if deltas[0].parts is None:
            message = AssistantMessage(content="".join(delta.text for delta in deltas))
        else:
            message = message_of(part for delta in deltas for part in delta.parts or ())
        reason = _finish_reason(last, has_calls=message.tool_calls is not UNSET)
        assert reason is not None  # of a whole answer
        return ChatChoice(
            last.choice, message, self._logprobs(deltas), reason, last.stop_reason, self.token_ids(deltas)
        )

    def chunks(self, delta: Delta, num_output_tokens: int) -> Iterator[ChatCompletionChunk]:
        """Yield one event for each token, after the roles of all choices in the order that clients expect."""
        if delta.index == 0 and not self._is_open:
            self._is_open, content = True, "" if delta.parts is None else None
            for number in range(len(self.asked.choices)):
                opening = ChatChunkChoice(number, MessageDelta(role="assistant", content=content))
                yield self._chunk([opening], self.chunk_usage(num_output_tokens - 1), is_first=True)
        if delta.parts is not None:
            yield from self._tool_chunks(delta, delta.parts, num_output_tokens)
        else:
            choice = self._piece(delta, MessageDelta(content=delta.text))
            yield self._chunk([choice], self.chunk_usage(num_output_tokens))

    def closing(self, num_output_tokens: int) -> bytes:
        """Return the event with the token counts, if the request wants it."""
        if not self.asked.stream_options.include_usage:
            return b""
        return event_of(self._chunk([], self.usage(num_output_tokens)))

    def _tool_chunks(
        self, delta: Delta, parts: Sequence[Part], num_output_tokens: int
    ) -> Iterator[ChatCompletionChunk]:
        """Yield one event for each new part. The last one has the token's other fields."""
        reported = self._reported[delta.choice]
        is_last = delta.finish_reason is not None
        is_needed = delta.logprobs is not None or not self.is_brief
        pieces = list(reported.of(parts, is_needed=is_needed, is_last=is_last))
        for number, piece in enumerate(pieces, 1):
            choice = ChatChunkChoice(delta.choice, piece)
            if number == len(pieces):
                choice = self._piece(delta, piece, has_calls=reported.has_calls)
            yield self._chunk([choice], self.chunk_usage(num_output_tokens))

    def _chunk(
        self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None, *, is_first: bool = False
    ) -> ChatCompletionChunk:
        """Return one event. The first of a stream has the ids of the prompt."""
        asked, ids = self.asked, self.prompt_token_ids(0) if is_first else UNSET
        return ChatCompletionChunk(asked.answer_id, asked.created, asked.model, choices, usage, ids)

    def _piece(self, delta: Delta, piece: MessageDelta, *, has_calls: bool = False) -> ChatChunkChoice:
        """Return the choice of an event with a token."""
        logprobs, reason = self._logprobs([delta]), _finish_reason(delta, has_calls=has_calls)
        ids = self.token_ids([delta])
        return ChatChunkChoice(delta.choice, piece, logprobs, reason, delta.stop_reason, ids)

    def _logprobs(self, deltas: Sequence[Delta]) -> ChatLogprobs | None:
        content = []
        for delta in deltas:
            if (logprobs := delta.logprobs) is not None:
                top = [TokenLogprob(*self._token(*likely)) for likely in logprobs.top]
                content.append(ChosenLogprob(*self._token(delta.token_id, logprobs.chosen), top))
        return ChatLogprobs(content) if content else None

    def _token(self, token_id: TokenId, logprob: float) -> tuple[str, float, list[int]]:
        return self.token_name(token_id), logprob, list(self.tokenizer.token_bytes(token_id))


def _finish_reason(last: Delta, *, has_calls: bool) -> ChatFinishReason | None:
    is_call = has_calls and last.finish_reason is FinishReason.STOP and not last.is_cut
    return "tool_calls" if is_call else finish_reason_of(last)


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
