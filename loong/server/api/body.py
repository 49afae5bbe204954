"""Request bodies, bounded in size, in time and in bytes at once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from loong.server.api.errors import ApiError
from loong.server.api.parsing import short
from loong.server.settings import ServerSettings


class Bodies:
    """The bodies that one server receives or reads at present."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._num_bytes = 0

    @asynccontextmanager
    async def receive(self, http: web.Request) -> AsyncIterator[bytes]:
        """Yield a whole body, whose bytes count until the context ends.

        Raises a 415 if the body is compressed or its type is not JSON, and a 413 as soon as it is too long.
        Raises a 408 after a timeout, and a 503 if all present bodies together are too large.
        """
        self._check_head(http)
        body = bytearray()
        try:
            if not http.content.is_eof():
                await self._collect_in_time(http, body)
            else:
                self._add(body, http.content.read_nowait())
            yield bytes(body)
        finally:
            self._num_bytes -= len(body)

    def _check_head(self, http: web.Request) -> None:
        content_type = http.headers.get("Content-Type")
        if content_type is None or not _is_json(
            content_type
        ):  # a page may send other types without a preflight
            found = "there is none" if content_type is None else f"it is {short(content_type)!r}"
            message = f"the Content-Type of a body must be application/json, but {found}"
            raise ApiError(415, message, "unsupported_media_type")
        encoding = http.headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":
            message = f"bodies must come as they are, but the Content-Encoding is {encoding!r}"
            raise ApiError(
                415, message, "unsupported_content_encoding", headers={"Accept-Encoding": "identity"}
            )
        if http.content_length is not None and http.content_length > self._settings.max_body_bytes:
            raise self._too_long(http.content_length)

    async def _collect_in_time(self, http: web.Request, body: bytearray) -> None:
        seconds = self._settings.body_timeout
        try:
            async with asyncio.timeout(seconds):
                while chunk := await http.content.readany():
                    self._add(body, chunk)
        except TimeoutError as error:
            raise ApiError(408, f"the body did not arrive within {seconds:g} s", "request_timeout") from error

    def _add(self, body: bytearray, chunk: bytes) -> None:
        settings = self._settings
        body += chunk
        self._num_bytes += len(chunk)
        if len(body) > settings.max_body_bytes:
            raise self._too_long(len(body))
        if self._num_bytes > settings.max_bodies_bytes and self._num_bytes > len(body):
            message = (
                f"bodies of {self._num_bytes} bytes are arriving, and {settings.max_bodies_bytes} may at once"
            )
            headers = {"Retry-After": str(settings.retry_after)}
            raise ApiError(503, message, "too_many_bodies", headers=headers)

    def _too_long(self, num_bytes: int) -> ApiError:
        most = self._settings.max_body_bytes
        return ApiError(
            413,
            f"the body has {num_bytes} bytes or more, but at most {most} are allowed",
            "request_entity_too_large",
        )


def _is_json(content_type: str) -> bool:
    """Return whether a media type is JSON, whatever its parameters are."""
    media_type = content_type.partition(";")[0].strip().lower()
    kind, _, subtype = media_type.partition("/")
    return media_type == "application/json" or (kind == "application" and subtype.endswith("+json"))
