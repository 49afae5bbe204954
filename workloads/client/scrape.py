"""Pages that a server reports about itself: its model, its counters, its history."""

from dataclasses import dataclass
from http import HTTPStatus

import msgspec

from loong.core.cluster_history import ClusterHistory
from loong.foreign_json import NOT_JSON
from loong.http_client import HTTPClient, Page, UnreachableError
from loong.workloads.errors import ServerUnusableError
from loong.workloads.metrics.counters import ServerCounters, parse_counters
from loong.workloads.report.timeline import parse_trace

SCRAPE_SECONDS = 60.0


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
        page = await self._get("/v1/models")
        if not page.is_ok:
            is_refused = page.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
            hint = "set LOONG_API_KEY to a key of it" if is_refused else "is this an OpenAI-style API?"
            raise ServerUnusableError(f"{self.base_url}/v1/models answers with HTTP {page.status}; {hint}")
        try:
            models = msgspec.json.decode(page.body, type=_WireModels).data
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
        page = await self._get("/metrics")
        if not page.is_ok:
            return ServerCounters()
        try:
            return parse_counters(page.body.decode(errors="replace"))
        except ValueError:
            return ServerCounters()

    async def history(self) -> ClusterHistory | None:
        """Return the history so far; None if the server has no readable `/trace`."""
        page = await self._get("/trace")
        if not page.is_ok:
            return None
        try:
            return parse_trace(page.body)
        except NOT_JSON:
            return None

    async def _get(self, path: str) -> Page:
        try:
            return await HTTPClient(self.base_url, self.api_key, SCRAPE_SECONDS).ask_async("GET", path)
        except UnreachableError as error:
            raise ServerUnusableError(f"no server answers at {self.base_url}: {error}") from error
