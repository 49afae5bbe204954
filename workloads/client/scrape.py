"""Pages that a server reports about itself: its model, its counters, its history."""

import os
from dataclasses import dataclass
from http import HTTPStatus

import aiohttp
import msgspec

from loong.core.cluster_history import ClusterHistory
from loong.foreign_json import NOT_JSON
from loong.workloads.errors import ServerUnusableError
from loong.workloads.metrics.counters import ServerCounters, parse_counters
from loong.workloads.report.timeline import parse_trace

SCRAPE_SECONDS = 60.0
_OK = HTTPStatus.OK


class ServedModel(msgspec.Struct, frozen=True):
    """One entry of `/v1/models`; `max_model_len` counts prompt and output, None if it is missing."""

    id: str
    max_model_len: int | None = None


class _WireModels(msgspec.Struct):
    data: list[ServedModel]


@dataclass(frozen=True, slots=True)
class Scraper:
    """Reads the pages of one server."""

    base_url: str
    api_key: str | None = None

    async def served_model(self, name: str | None) -> ServedModel:
        """Return the model of that name, or the first one if none is named.

        Raises:
            ServerUnusableError: the server does not answer as the OpenAI API does, or lacks that model.
        """
        status, page = await self._get("/v1/models")
        if status != _OK:
            is_refused = status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
            hint = "set LOONG_API_KEY to a key of it" if is_refused else "is this an OpenAI-style API?"
            raise ServerUnusableError(f"{self.base_url}/v1/models answers with HTTP {status}; {hint}")
        try:
            models = msgspec.json.decode(page, type=_WireModels).data
        except NOT_JSON as error:
            raise ServerUnusableError(
                f"{self.base_url}/v1/models is not a list of models: {error}"
            ) from error
        for model in models:
            if name in (None, model.id):
                return model
        served = ", ".join(model.id for model in models) or "none"
        raise ServerUnusableError(f"--model {name!r} is not served at {self.base_url}; served: {served}")

    async def counters(self) -> ServerCounters:
        """Return the totals so far; all unknown if the server has no readable `/metrics`."""
        status, page = await self._get("/metrics")
        if status != _OK:
            return ServerCounters()
        try:
            return parse_counters(page.decode(errors="replace"))
        except ValueError:
            return ServerCounters()

    async def history(self) -> ClusterHistory | None:
        """Return the history so far; None if the server has no readable `/trace`."""
        status, page = await self._get("/trace")
        if status != _OK:
            return None
        try:
            return parse_trace(page)
        except NOT_JSON:
            return None

    async def _get(self, path: str) -> tuple[int, bytes]:
        """Return the status, and the page."""
        url = f"{self.base_url}{path}"
        headers = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        timeout = aiohttp.ClientTimeout(total=SCRAPE_SECONDS)
        try:
            async with (
                aiohttp.ClientSession(headers=headers, timeout=timeout) as session,
                session.get(url) as response,
            ):
                return response.status, await response.read()
        except TimeoutError as error:
            raise ServerUnusableError(f"{url} did not answer within {SCRAPE_SECONDS:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerUnusableError(f"no server answers at {self.base_url}: {_reason(error)}") from error


def _reason(error: aiohttp.ClientError | OSError) -> str:
    """Return the reason, in the system's words if it is the system's error."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if not isinstance(cause, OSError) or cause.errno is None:
        return str(error)
    return os.strerror(cause.errno) if cause.errno > 0 else str(cause.strerror)  # below 0: of names
