"""A server's routes for operators."""

from dataclasses import dataclass

import msgspec

from loong.core.errors import LoongError
from loong.foreign_json import NOT_JSON
from loong.http_client import HTTPClient, UnreachableError


class ScaleError(LoongError):
    """The server cannot be reached, or refuses."""


class Instance(msgspec.Struct, frozen=True):
    """An instance of a server."""

    id: int
    state: str
    kv_used: int
    kv_capacity: int
    kind: str = "full"


class Size(msgspec.Struct, frozen=True):
    """The instances of a server, and the numbers that are asked for and possible."""

    num_instances: int
    max_instances: int
    is_done: bool
    instances: tuple[Instance, ...]
    memory_instances: int = 0


@dataclass(frozen=True, slots=True)
class OperatedServer:
    """A server and its admin key, and one of its engines if there are several.

    Raises `ConfigError` for a wrong URL.
    """

    base_url: str
    admin_key: str
    engine_id: int | None = None

    def __post_init__(self) -> None:
        self._client()

    def size(self) -> Size:
        """Return the present instances. Raises `ScaleError`."""
        return self._ask("GET", "/admin/instances")

    def scale(self, num_instances: int, memory_instances: int | None = None) -> Size:
        """Begin the change to a number of instances, and return the present ones. Raises `ScaleError`.

        That of memory instances stays if it is None.
        """
        body = {"num_instances": num_instances, "memory_instances": memory_instances}
        return self._ask("POST", "/admin/scale", {name: n for name, n in body.items() if n is not None})

    def _client(self) -> HTTPClient:
        return HTTPClient(self.base_url, self.admin_key)

    def _ask(self, method: str, path: str, body: object = None) -> Size:
        query = "" if self.engine_id is None else f"?engine={self.engine_id}"
        try:
            page = self._client().ask(method, path + query, body)
        except UnreachableError as error:
            raise ScaleError(f"{self.base_url} does not answer: {error}") from None
        if not page.is_ok:
            raise ScaleError(page.reason)
        try:
            return msgspec.json.decode(page.body, type=Size)
        except NOT_JSON:
            raise ScaleError(
                f"{self.base_url} is no server of loong: it answers {page.body[:80]!r}"
            ) from None
