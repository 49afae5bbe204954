"""A server's routes for operators."""

import http.client
import json
from contextlib import closing
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec

from loong.core.errors import ConfigError, LoongError
from loong.foreign_json import NOT_JSON

TIMEOUT_SECONDS = 30.0


class ScaleError(LoongError):
    """The server cannot be reached, or refuses."""


class Instance(msgspec.Struct, frozen=True):
    """An instance of a server."""

    id: int
    state: str
    kv_used: int
    kv_capacity: int


class Size(msgspec.Struct, frozen=True):
    """The instances of a server, and the numbers that are asked for and possible."""

    num_instances: int
    max_instances: int
    is_done: bool
    instances: tuple[Instance, ...]


@dataclass(frozen=True, slots=True)
class OperatedServer:
    """A server and its admin key. Raises `ConfigError` for a wrong URL."""

    base_url: str
    admin_key: str

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--base-url {self.base_url!r} is not a URL such as http://localhost:8000")

    def size(self) -> Size:
        """Return the present instances. Raises `ScaleError`."""
        return self._ask("GET", "/admin/instances")

    def scale(self, num_instances: int) -> Size:
        """Begin the change to a number of instances, and return the present ones. Raises `ScaleError`."""
        return self._ask("POST", "/admin/scale", json.dumps({"num_instances": num_instances}).encode())

    def _ask(self, method: str, path: str, body: bytes | None = None) -> Size:
        parts = urlsplit(self.base_url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        headers = {"Authorization": f"Bearer {self.admin_key}", "Content-Type": "application/json"}
        folder = parts.path.rstrip("/").removesuffix("/v1")
        try:
            with closing(kind(parts.hostname or "", parts.port, timeout=TIMEOUT_SECONDS)) as connection:
                connection.request(method, folder + path, body, headers)
                response = connection.getresponse()
                answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise ScaleError(f"{self.base_url} does not answer: {reason}") from None
        if response.status != http.HTTPStatus.OK:
            raise ScaleError(_reason(response.status, answer))
        try:
            return msgspec.json.decode(answer, type=Size)
        except NOT_JSON:
            raise ScaleError(f"{self.base_url} is no server of loong: it answers {answer[:80]!r}") from None


def _reason(status: int, body: bytes) -> str:
    try:
        message: str = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"the server answers with status {status}"
    return message
