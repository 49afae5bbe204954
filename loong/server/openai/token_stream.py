"""The tokens of one request, for the one task that reads them."""

from types import TracebackType
from typing import Self

from loong.core.cached_tokens import CachedTokens
from loong.core.errors import LoongError
from loong.core.events import ProducedToken
from loong.core.prompt_logprobs import PromptLogprobs
from loong.core.request import FinishReason, NewRequest, RequestId
from loong.engine.client import Answered, TokenEngine
from loong.messages.stream import Stream


class TokenStream:
    """A request, which is aborted at the end of its context unless it has ended.

    Then its client has left, or one of its choices has failed.
    Iterating yields the tokens of all choices. It raises the error that ends the request.
    `prompt_logprobs` are set before the first token, if the request wants them. `num_cached_tokens` are, too.
    """

    def __init__(self, engine: TokenEngine, request: NewRequest) -> None:
        self._engine, self._request = engine, request
        self._open = set(request.choice_ids)
        self._stream: Stream[Answered] = Stream()
        self.prompt_logprobs: PromptLogprobs | None = None
        self.num_cached_tokens = 0

    def __enter__(self) -> Self:
        self._engine.submit(self._request, self._stream.put)
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _where: TracebackType | None
    ) -> None:
        reason = FinishReason.ERROR if isinstance(error, LoongError) else FinishReason.ABORT
        for request_id in tuple(self._open):
            self.abort(request_id, reason)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ProducedToken:
        while self._open:
            token = await self._stream.get()
            if isinstance(token, LoongError):
                raise token
            if isinstance(token, PromptLogprobs):
                self.prompt_logprobs = token
                continue
            if isinstance(token, CachedTokens):
                self.num_cached_tokens = token.num_tokens
                continue
            if token.request_id not in self._open:
                continue  # it was sent before the choice was aborted
            if token.finish_reason is not None:
                self._open.remove(token.request_id)
            return token
        raise StopAsyncIteration

    def abort(self, request_id: RequestId, reason: FinishReason) -> None:
        """Abort one choice unless it has ended. No more of its tokens are yielded."""
        if request_id in self._open:
            self._open.remove(request_id)
            self._engine.abort(request_id, reason)
