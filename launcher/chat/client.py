"""A server's chat completions, streamed; it waits for each piece, so that an interrupt stops it there."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import NamedTuple, TypeAlias
from urllib.parse import urlsplit

import msgspec

from loong.core.errors import LoongError
from loong.foreign_json import NOT_JSON
from loong.http_client import BrokenOffError, HTTPClient, RefusedError, UnreachableError
from loong.workloads.client.sse import EventDecoder

TIMEOUT_SECONDS = 600.0  # without a byte; servers of ours send comments in between

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
DEFAULT_PORT = 8000  # of `loong serve`

Message: TypeAlias = Mapping[str, str]


class Piece(NamedTuple):
    """A piece of an answer, or (with `num_tokens`) the number of all its tokens at the end."""

    text: str
    num_tokens: int | None = None


class ChatError(LoongError):
    """The server cannot be reached, or answers with an error."""


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


@dataclass(frozen=True, slots=True)
class ChatServer:
    """Where to send conversations. Raises `ConfigError` for a wrong URL."""

    base_url: str
    api_key: str | None = None

    def __post_init__(self) -> None:
        self._client()

    def model(self) -> str:
        """Return the first model that is served. Raises `ChatError`."""
        with self._reported():
            page = self._client().ask("GET", "/v1/models")
            if not page.is_ok:
                raise RefusedError(page)
        try:
            return msgspec.json.decode(page.body, type=_Models).data[0].id
        except (*NOT_JSON, IndexError):
            raise ChatError(f"{self.base_url} does not say which models it serves") from None

    def answer(
        self, messages: Sequence[Message], options: Mapping[str, object]
    ) -> Generator[Piece, None, None]:
        """Yield the next message piece by piece; closing the iterator stops the answer.

        Raises `ChatError`.
        """
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        body = {**options, **streamed, "messages": list(messages)}
        decoder = EventDecoder()
        with self._reported(), self._client().stream("/v1/chat/completions", body) as parts:
            for part in parts:
                for event in decoder.feed(part):
                    if event == "[DONE]":
                        return
                    yield _piece(event)
            raise BrokenOffError("the server hung up")

    def _client(self) -> HTTPClient:
        return HTTPClient(self.base_url, self.api_key, TIMEOUT_SECONDS)

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Raise `ChatError`, with what may help, in place of the client's errors."""
        try:
            yield
        except UnreachableError as error:
            raise ChatError(f"{self.base_url} does not answer: {error}{self._start_hint()}") from None
        except RefusedError as error:
            is_unknown = error.status == HTTPStatus.UNAUTHORIZED
            hint = "; set $LOONG_API_KEY or --api-key-file" if is_unknown else ""
            raise ChatError(f"{error}{hint}") from None
        except BrokenOffError as error:
            raise ChatError(f"the answer broke off: {error}") from None

    def _start_hint(self) -> str:
        """Return how to start a server there, if that is on this machine."""
        parts = urlsplit(self.base_url)
        if parts.hostname not in LOCAL_HOSTS:
            return ""
        port = "" if parts.port == DEFAULT_PORT else f" --port {parts.port or 80}"
        return f"; start a server in another terminal: loong serve{port}"


def _piece(text: str) -> Piece:
    try:
        event = msgspec.json.decode(text)
    except NOT_JSON as reason:
        raise BrokenOffError(str(reason)) from None
    if not isinstance(event, dict):
        raise ChatError(f"the server streams {event!r}, which is no event of a chat")
    if (error := event.get("error")) is not None:
        raise ChatError(error["message"] if isinstance(error, dict) and "message" in error else str(error))
    said = "".join(choice.get("delta", {}).get("content") or "" for choice in event.get("choices", ()))
    return Piece(said, (event.get("usage") or {}).get("completion_tokens"))
