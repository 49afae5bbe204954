"""The bound on work that waits: past it, a client is told at once to come back later."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from loong.core.request import RequestId
from loong.server.errors import ApiError, bad_request


class Admission:
    """Counts the requests in flight, and those of them that wait for their first token."""

    def __init__(
        self,
        *,
        max_waiting_requests: int,
        max_waiting_tokens: int,
        retry_after: int,
        max_requests_per_key: int | None = None,
    ) -> None:
        self._max_requests = max_waiting_requests
        self._max_per_key = max_requests_per_key
        self._by_key: Counter[int] = Counter()  # requests in flight
        self._max_tokens = max_waiting_tokens
        self._retry_after = retry_after
        self._waiting: dict[RequestId, int] = {}  # prompt tokens by request id
        self.num_in_flight = 0
        self.is_closed = False

    def close(self) -> None:
        """Admit nothing more: the server is about to end."""
        self.is_closed = True

    @contextmanager
    def admit(self, num_prompt_tokens: Mapping[RequestId, int], key: int | None = None) -> Iterator[None]:
        """Count requests in while the context lasts, all or none; raise a 503 if a bound would be passed.

        A queue that holds nothing takes any, so none are refused for ever. If they came with the API key of
        the number `key`, which may not have so many more in flight, raise a 429, or a 400 if it never may.
        """
        if self.is_closed:
            message = "the server is shutting down, and takes no more requests"
            raise ApiError(503, message, "shutting_down", headers={"Retry-After": str(self._retry_after)})
        num_requests = len(num_prompt_tokens)
        self._check_key(key, num_requests)
        self._check_room(num_requests, sum(num_prompt_tokens.values()))
        self._waiting |= num_prompt_tokens
        self.num_in_flight += num_requests
        if key is not None:
            self._by_key[key] += num_requests
        try:
            yield
        finally:
            self.num_in_flight -= num_requests
            if key is not None:
                self._by_key[key] -= num_requests
            for request_id in num_prompt_tokens:
                self.stop_waiting(request_id)

    def stop_waiting(self, request_id: RequestId) -> None:
        """Tell that a request has its first token."""
        self._waiting.pop(request_id, None)

    def _check_key(self, key: int | None, num_new: int) -> None:
        most = self._max_per_key
        if key is None or most is None:
            return
        if num_new > most:
            message = f"there are {num_new} prompts, and {most} requests of this API key may be in flight"
            raise bad_request(message, "prompt")
        if self._by_key[key] + num_new > most:
            message = f"this API key has {self._by_key[key]} requests in flight, and {most} may be"
            headers = {"Retry-After": str(self._retry_after)}
            raise ApiError(429, message, "rate_limit_exceeded", headers=headers)

    def _check_room(self, num_new: int, num_new_tokens: int) -> None:
        num_requests, num_tokens = len(self._waiting), sum(self._waiting.values())
        if num_requests and num_requests + num_new > self._max_requests:
            raise self._refusal(f"{num_requests} requests are waiting, and {self._max_requests} may")
        if num_requests and num_tokens + num_new_tokens > self._max_tokens:
            raise self._refusal(
                f"prompts of {num_tokens} tokens are waiting, and with the {num_new_tokens} of this one "
                f"they would pass the bound of {self._max_tokens}"
            )

    def _refusal(self, why: str) -> ApiError:
        headers = {"Retry-After": str(self._retry_after)}
        return ApiError(503, f"the queue is full: {why}", "queue_full", headers=headers)
