"""A bound on the requests that wait.

A client beyond the bound gets an error at once, with a time to retry.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from loong.core.errors import EngineStoppedError
from loong.core.request import RequestId
from loong.engine.client import RequestLoad
from loong.server.api.errors import ApiError, bad_request
from loong.server.settings import ServerSettings


class Admission:
    """Counts the requests in flight, and those that wait for their first token."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._by_key: Counter[int] = Counter()  # requests in flight
        self._waiting: dict[RequestId, int] = {}  # prompt tokens by request id
        self.num_in_flight = 0
        self.is_closed = False
        self.is_stopped = False

    def close(self) -> None:
        """Admit no more requests, because the server shuts down."""
        self.is_closed = True

    def stop(self) -> None:
        """Admit no more requests, because the engine has stopped."""
        self.is_stopped = True

    @contextmanager
    def admit(self, load: RequestLoad) -> Iterator[None]:
        """Count requests, all or none, while the context lasts.

        Raises a 503 beyond a bound; an empty queue accepts any number, so that no request is refused for
        ever. Raises a 429 if the API key would have too many answers in flight, and a 400 if these alone are
        too many.
        """
        if self.is_stopped:
            raise EngineStoppedError
        if self.is_closed:
            message = "the server is shutting down, and takes no more requests"
            raise ApiError(503, message, "shutting_down", headers=self._retry_after)
        num_prompt_tokens = load.num_prompt_tokens
        num_answers = len(num_prompt_tokens) * load.num_choices
        self._check_key(load.key, num_answers)
        self._check_room(len(num_prompt_tokens), sum(num_prompt_tokens.values()))
        self._waiting |= num_prompt_tokens
        self.num_in_flight += num_answers
        if load.key is not None:
            self._by_key[load.key] += num_answers
        try:
            yield
        finally:
            self.num_in_flight -= num_answers
            if load.key is not None:
                self._by_key[load.key] -= num_answers
            for request_id in num_prompt_tokens:
                self.stop_waiting(request_id)

    async def wait_until_idle(self) -> None:
        """Wait until no request is in flight."""
        while self.num_in_flight:  # noqa: ASYNC110 - only at the end of a server's life
            await asyncio.sleep(0.02)

    @property
    def _retry_after(self) -> Mapping[str, str]:
        return {"Retry-After": str(self._settings.retry_after)}

    def stop_waiting(self, request_id: RequestId) -> None:
        """Record that a request has its first token."""
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
            raise ApiError(429, message, "rate_limit_exceeded", headers=self._retry_after)

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
        return ApiError(503, f"the queue is full: {why}", "queue_full", headers=self._retry_after)
