"""The bound on work that waits: past it, a client is told at once to come back later."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from loong.core.errors import EngineStoppedError
from loong.core.request import RequestId
from loong.engine.client import Asking
from loong.server.api.errors import ApiError, bad_request
from loong.server.settings import ServerSettings


class Admission:
    """Counts the requests in flight, and those of them that wait for their first token."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._by_key: Counter[int] = Counter()  # requests in flight
        self._waiting: dict[RequestId, int] = {}  # prompt tokens by request id
        self.num_in_flight = 0
        self.is_closed = False
        self.is_stopped = False

    def close(self) -> None:
        """Admit nothing more: the server is about to end."""
        self.is_closed = True

    def stop(self) -> None:
        """Admit nothing more: the engine has stopped."""
        self.is_stopped = True

    @contextmanager
    def admit(self, asking: Asking) -> Iterator[None]:
        """Count requests in while the context lasts, all or none; raise a 503 if a bound would be passed.

        A queue that holds nothing takes any, so none are refused for ever. If they came with an API key
        that may not have so many more in flight, raise a 429, or a 400 if it never may.
        """
        if self.is_stopped:
            raise EngineStoppedError
        if self.is_closed:
            message = "the server is shutting down, and takes no more requests"
            raise ApiError(503, message, "shutting_down", headers=self._come_back)
        num_prompt_tokens = asking.num_prompt_tokens
        num_answers = len(num_prompt_tokens) * asking.num_choices
        self._check_key(asking.key, num_answers)
        self._check_room(len(num_prompt_tokens), sum(num_prompt_tokens.values()))
        self._waiting |= num_prompt_tokens
        self.num_in_flight += num_answers
        if asking.key is not None:
            self._by_key[asking.key] += num_answers
        try:
            yield
        finally:
            self.num_in_flight -= num_answers
            if asking.key is not None:
                self._by_key[asking.key] -= num_answers
            for request_id in num_prompt_tokens:
                self.stop_waiting(request_id)

    async def wait_until_idle(self) -> None:
        """Wait until nothing is in flight."""
        while self.num_in_flight:  # noqa: ASYNC110 - only at the end of a server's life
            await asyncio.sleep(0.02)

    @property
    def _come_back(self) -> Mapping[str, str]:
        return {"Retry-After": str(self._settings.retry_after)}

    def stop_waiting(self, request_id: RequestId) -> None:
        """Tell that a request has its first token."""
        self._waiting.pop(request_id, None)

    def _check_key(self, key: int | None, num_new: int) -> None:
        most = self._settings.max_requests_per_key
        if key is None or most is None:
            return
        if num_new > most:
            message = f"this asks for {num_new} answers, and {most} of this API key may be in flight"
            raise bad_request(message, "prompt")
        if self._by_key[key] + num_new > most:
            message = f"this API key has {self._by_key[key]} answers in flight, and {most} may be"
            raise ApiError(429, message, "rate_limit_exceeded", headers=self._come_back)

    def _check_room(self, num_new: int, num_new_tokens: int) -> None:
        num_requests, num_tokens = len(self._waiting), sum(self._waiting.values())
        max_requests, max_tokens = self._settings.max_waiting_requests, self._settings.max_waiting_tokens
        if num_requests and num_requests + num_new > max_requests:
            raise self._refusal(f"{num_requests} requests are waiting, and {max_requests} may")
        if num_requests and num_tokens + num_new_tokens > max_tokens:
            raise self._refusal(
                f"prompts of {num_tokens} tokens are waiting, and with the {num_new_tokens} of this one "
                f"they would pass the bound of {max_tokens}"
            )

    def _refusal(self, why: str) -> ApiError:
        return ApiError(503, f"the queue is full: {why}", "queue_full", headers=self._come_back)
