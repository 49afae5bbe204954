"""One request to the engine, counted and logged."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping

from loong.core.errors import LoongError
from loong.core.events import ProducedToken
from loong.core.request import FinishReason, NewRequest, RequestId
from loong.server.api.request_ids import logged_name
from loong.server.context import Server
from loong.server.metrics.spans import TRACEPARENT
from loong.server.openai.output import Delta, Output, OutputOptions
from loong.server.openai.token_stream import TokenStream

logger = logging.getLogger(__name__)


async def generate(
    server: Server, request: NewRequest, options: OutputOptions, arrived_at: float, *, choice: int = 0
) -> AsyncGenerator[Delta, None]:
    """Yield the answers to an admitted request, token by token. Its choices are numbered from `choice`.

    `arrived_at` is a time of the monotonic clock. The request is aborted when the generator is closed early,
    or when its task is cancelled. Raises the error that ends the request.
    """
    answers = {
        choice_id: _Answer(server, Output(request, options, server.tokenizer, index), arrived_at)
        for index, choice_id in enumerate(request.choice_ids, choice)
    }
    if (traceparent := TRACEPARENT.get()) is not None:
        for request_id in answers:
            server.engine.note_parent(request_id, traceparent)
    reason = FinishReason.ABORT
    try:
        with TokenStream(server.engine, request) as tokens:
            async for token in tokens:
                answer = answers[token.request_id]
                is_first = token.request_id == request.request_id  # the choice for which the prompt counts
                delta = answer.add(token, len(request.prompt_token_ids) if is_first else 0)
                if delta.index == 0 and tokens.prompt_logprobs is not None:
                    delta = delta._replace(prompt_logprobs=tokens.prompt_logprobs)
                if tokens.num_cached_tokens:
                    delta = delta._replace(num_cached_tokens=tokens.num_cached_tokens)
                    tokens.num_cached_tokens = 0  # they count once for all choices
                if delta.finish_reason is not None:
                    tokens.abort(token.request_id, delta.finish_reason)
                    if len(answers) == 1:
                        reason = delta.finish_reason
                    else:
                        del answers[token.request_id]
                        answer.end(delta.finish_reason)
                yield delta
    except LoongError as error:
        reason = FinishReason.ERROR
        name, num_tokens = logged_name(request.request_id), _count(answers)
        logger.warning("request %s failed after %d tokens: %s", name, num_tokens, error)
        raise
    except (asyncio.CancelledError, GeneratorExit):
        if reason is FinishReason.ABORT:  # one line for all its choices
            name, num_tokens = logged_name(request.request_id), _count(answers)
            logger.info("request %s aborted after %d tokens: the client has left", name, num_tokens)
        raise
    finally:
        for answer in answers.values():
            answer.end(reason)


def _count(answers: "Mapping[RequestId, _Answer]") -> int:
    """Return the number of tokens of all choices that have not ended."""
    return sum(answer.num_tokens for answer in answers.values())


class _Answer:
    """One choice as it grows, with its counts."""

    def __init__(self, server: Server, output: Output, arrived_at: float) -> None:
        self._server, self._output = server, output
        self._arrived_at = self._last_token_at = arrived_at

    @property
    def num_tokens(self) -> int:
        """The number of tokens so far."""
        return self._output.num_tokens

    def add(self, token: ProducedToken, num_prompt_tokens: int) -> Delta:
        """Take the next token. With the first one, `num_prompt_tokens` are counted."""
        now, metrics = time.monotonic(), self._server.metrics
        if self.num_tokens == 0:
            metrics.observe_first_token(now - self._arrived_at, num_prompt_tokens)
        else:
            metrics.observe_token(now - self._last_token_at)
        self._last_token_at = now
        return self._output.add(token)

    def end(self, reason: FinishReason) -> None:
        """Count the end of the choice."""
        self._server.metrics.observe_end(reason, time.monotonic() - self._arrived_at, self.num_tokens)
