"""What a server tells about itself: its model, its counters, its history."""

from dataclasses import dataclass

import aiohttp
import msgspec

from loong.core.timeline import ClusterHistory
from loong.workloads.counters import ServerCounters, parse_counters
from loong.workloads.errors import ServerUnusableError
from loong.workloads.timeline import parse_trace

SCRAPE_SECONDS = 60.0


class ServedModel(msgspec.Struct, frozen=True):
    """One entry of `/v1/models`; `max_model_len` counts prompt and output, None where it is not told."""

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
        if page is None:
            raise ServerUnusableError(f"{self.base_url}/v1/models is not there; is this an OpenAI-style API?")
        try:
            models = msgspec.json.decode(page, type=_WireModels).data
        except msgspec.MsgspecError as error:
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
        if page is None:
            return ServerCounters()
        try:
            return parse_counters(page.decode(errors="replace"))
        except ValueError:
            return ServerCounters()

    async def history(self) -> ClusterHistory | None:
        """Return what ran so far; None if the server has no readable `/trace`."""
        page = await self._get("/trace")
        if page is None:
            return None
        try:
            return parse_trace(page)
        except msgspec.MsgspecError:
            return None

    async def _get(self, path: str) -> bytes | None:
        """Return the page, None unless the status is 200."""
        url = f"{self.base_url}{path}"
        headers = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        timeout = aiohttp.ClientTimeout(total=SCRAPE_SECONDS)
        try:
            async with (
                aiohttp.ClientSession(headers=headers, timeout=timeout) as session,
                session.get(url) as response,
            ):
                return await response.read() if response.status == 200 else None
        except TimeoutError as error:
            raise ServerUnusableError(f"{url} did not answer within {SCRAPE_SECONDS:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerUnusableError(f"no server answers at {self.base_url}: {error}") from error
