"""A client of one server over HTTP, for pages and streams; a load generator has `ConnectionPool`."""

import asyncio
import logging
import os
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import httpx2
import msgspec

from loong.core.errors import ConfigError, LoongError
from loong.foreign_json import NOT_JSON

logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs each request


class UnreachableError(LoongError):
    """No server answers. The text is the reason."""


class BrokenOffError(LoongError):
    """An answer ended in the middle. The text is the reason."""


class ErrorBody(msgspec.Struct):
    """An error as the OpenAI API reports it."""

    message: str | None = None
    code: str | None = None


class _Refused(msgspec.Struct):
    error: ErrorBody = msgspec.field(default_factory=ErrorBody)


@dataclass(frozen=True, slots=True)
class Page:
    """An answer."""

    status: int
    body: bytes

    @property
    def is_ok(self) -> bool:
        """Return whether the status is 200."""
        return self.status == HTTPStatus.OK

    @property
    def error(self) -> ErrorBody:
        """Return the reason of a refusal, as far as the server gives one."""
        try:
            return msgspec.json.decode(self.body, type=_Refused).error
        except NOT_JSON:
            return ErrorBody()

    @property
    def reason(self) -> str:
        """Return why the server refuses: its message, or the status."""
        return self.error.message or f"the server answers with status {self.status}"


class RefusedError(LoongError):
    """A server refuses a request. The text is the reason."""

    def __init__(self, page: Page) -> None:
        super().__init__(page.reason)
        self.status = page.status


@dataclass(frozen=True, slots=True)
class HTTPClient:
    """Asks one server, whose URL may end with `/v1`. Raises `ConfigError` for a wrong URL.

    `key` goes into each request. A request ends if no byte arrives for `timeout` seconds, and one of asyncio
    if it takes longer than that as a whole.
    """

    base_url: str
    key: str | None = None
    timeout: float = 30.0

    def __post_init__(self) -> None:
        if not _is_http(self.base_url):
            raise ConfigError(f"--base-url {self.base_url!r} is not a URL such as http://localhost:8000")

    def ask(self, method: str, path: str, body: object = None) -> Page:
        """Return the answer to a request, whose body is sent as JSON. Raises `UnreachableError`."""
        with httpx2.Client(**self._settings) as client:
            try:
                return _page(client.request(method, self._url(path), content=_encoded(body)))
            except httpx2.HTTPError as error:
                raise UnreachableError(_reason(error)) from None

    async def ask_async(self, method: str, path: str, body: object = None) -> Page:
        """Return the answer to a request, as `ask` does."""
        async with httpx2.AsyncClient(**self._settings) as client:
            try:
                async with asyncio.timeout(self.timeout):
                    return _page(await client.request(method, self._url(path), content=_encoded(body)))
            except TimeoutError:
                raise UnreachableError(f"{path} took more than {self.timeout:g} s") from None
            except httpx2.HTTPError as error:
                raise UnreachableError(_reason(error)) from None

    @contextmanager
    def stream(self, path: str, body: object) -> Iterator[Iterator[bytes]]:
        """Send a POST, and yield the parts of the answer as they arrive. The request ends with the context.

        Raises `UnreachableError` or `RefusedError`, and later `BrokenOffError`.
        """
        with httpx2.Client(**self._settings) as client:
            request = client.build_request("POST", self._url(path), content=_encoded(body))
            try:
                response = client.send(request, stream=True)
                if response.status_code != HTTPStatus.OK:
                    response.read()
                    raise RefusedError(_page(response))
            except httpx2.HTTPError as error:
                raise UnreachableError(_reason(error)) from None
            try:
                yield response.iter_bytes()
            except httpx2.TimeoutException as error:
                raise BrokenOffError(_reason(error)) from None
            except httpx2.HTTPError:  # by a reset, or by an end that is too early
                raise BrokenOffError("the server hung up") from None
            finally:
                response.close()

    def _url(self, path: str) -> str:
        return self.base_url.rstrip("/").removesuffix("/v1") + path

    @property
    def _settings(self) -> Mapping[str, Any]:
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        is_secure = urlsplit(self.base_url).scheme == "https"
        verify = ssl.create_default_context() if is_secure else False
        return {
            "headers": headers,
            "timeout": self.timeout,
            "verify": verify,
            "trust_env": False,
            "follow_redirects": True,
        }


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # as the port is none
        return False


def _encoded(body: object) -> bytes | None:
    return None if body is None else msgspec.json.encode(body)


def _page(response: httpx2.Response) -> Page:
    return Page(response.status_code, response.content)


def _reason(error: BaseException) -> str:
    """Return the reason in the system's words if the system is where the error is from."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        if isinstance(cause, OSError) and cause.errno is not None:
            # asyncio says more than the system; a number below 0 is of a name that is not found
            return os.strerror(cause.errno) if cause.errno > 0 else str(cause.strerror)
        cause = cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__
