"""A server's chat completions, streamed; it waits for each piece, so that an interrupt stops it there."""

import http.client
import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import urlsplit

from loong.core.errors import ConfigError, LoongError

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


@dataclass(frozen=True, slots=True)
class ChatServer:
    """Where to send conversations. Raises `ConfigError` for a wrong URL."""

    base_url: str
    api_key: str | None = None

    def __post_init__(self) -> None:
        if not _is_http(self.base_url):
            raise ConfigError(f"--base-url {self.base_url!r} is not a URL such as http://localhost:8000")

    def model(self) -> str:
        """Return the first model that is served. Raises `ChatError`."""
        with closing(self._connection()) as connection:
            response = self._ask(connection, "GET", "/v1/models")
            try:
                name: str = json.loads(response.read())["data"][0]["id"]
            except (ValueError, LookupError, TypeError, RecursionError, OSError, http.client.HTTPException):
                raise ChatError(f"{self.base_url} does not say which models it serves") from None
        return name

    def answer(
        self, messages: Sequence[Message], options: Mapping[str, object]
    ) -> Generator[Piece, None, None]:
        """Yield the next message piece by piece; closing the iterator stops the answer.

        Raises `ChatError`.
        """
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        body = json.dumps({**options, **streamed, "messages": list(messages)}).encode()
        with closing(self._connection()) as connection:
            response = self._ask(connection, "POST", "/v1/chat/completions", body)
            try:
                for line in response:
                    if line.startswith(b"data:"):
                        if (data := line[5:].strip()) == b"[DONE]":
                            return
                        yield _piece(json.loads(data))
            except ConnectionResetError:
                pass  # reported below: a server that goes away ends its answer so, or cleanly and too early
            except (ValueError, RecursionError, OSError, http.client.HTTPException) as error:
                raise ChatError(f"the answer broke off: {error}") from None
            raise ChatError("the answer broke off: the server hung up")

    def _connection(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.base_url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        return kind(parts.hostname or "", parts.port, timeout=TIMEOUT_SECONDS)

    def _start_hint(self) -> str:
        """Return how to start a server there, if that is on this machine."""
        parts = urlsplit(self.base_url)
        if parts.hostname not in LOCAL_HOSTS:
            return ""
        port = "" if parts.port == DEFAULT_PORT else f" --port {parts.port or 80}"
        return f"; start a server in another terminal: loong serve{port}"

    def _ask(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None = None
    ) -> http.client.HTTPResponse:
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        folder = urlsplit(self.base_url).path.rstrip("/").removesuffix("/v1")
        try:
            connection.request(method, folder + path, body, headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise ChatError(f"{self.base_url} does not answer: {reason}{self._start_hint()}") from None
        if response.status != http.HTTPStatus.OK:
            is_unknown = response.status == http.HTTPStatus.UNAUTHORIZED
            hint = "; set $LOONG_API_KEY or --api-key-file" if is_unknown else ""
            raise ChatError(_reason(response.status, response.read()) + hint)
        return response


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # as the port is none
        return False


def _piece(event: Any) -> Piece:
    if not isinstance(event, dict):
        raise ChatError(f"the server streams {event!r}, which is no event of a chat")
    if (error := event.get("error")) is not None:
        raise ChatError(error["message"] if isinstance(error, dict) and "message" in error else str(error))
    text = "".join(choice.get("delta", {}).get("content") or "" for choice in event.get("choices", ()))
    return Piece(text, (event.get("usage") or {}).get("completion_tokens"))


def _reason(status: int, body: bytes) -> str:
    try:
        message: str = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"the server answers with status {status}"
    return message
