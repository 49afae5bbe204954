"""The server under faults: its faults, its counts and its health."""

from dataclasses import dataclass
from http import HTTPStatus

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from loong.engine.faults import FaultKind
from loong.http_client import HTTPClient, Page, UnreachableError
from loong.workloads.errors import ServerUnusableError

PATH = "/admin/faults"


@dataclass(frozen=True, slots=True)
class ServerTotals:
    """Counts of a server since its start, and what its processes with engines use; None: not reported."""

    num_losses: int | None = None
    num_joins: int | None = None
    num_memory_bytes: int | None = None
    num_descriptors: int | None = None
    num_engine_losses: int | None = None
    num_taken_over: int | None = None  # requests of lost engines


class FaultRefusedError(Exception):
    """The server could not inject a fault now."""


class Injected(msgspec.Struct, frozen=True):
    """The place of a fault: an instance, an engine, an instance of an engine, or (neither) the gManager."""

    engine: int | None = None
    instance: int | None = None

    def __str__(self) -> str:
        """Return it in words."""
        engine = "" if self.engine is None else f"engine {self.engine}"
        if self.instance is None:
            return engine or "the gManager"
        return f"instance {self.instance}{engine and f' of {engine}'}"


class _Health(msgspec.Struct):
    status: str


class FaultClient:
    """A client of a server with `--allow-fault-injection`. `key` is its admin key if it has one."""

    def __init__(self, base_url: str, key: str | None) -> None:
        self._base_url, self._client = base_url, HTTPClient(base_url, key)

    async def check_faults(self) -> None:
        """Raise `ServerUnusableError` unless the server injects faults. None is injected."""
        page = await self._ask("POST", PATH, {})
        if page.status == HTTPStatus.BAD_REQUEST:  # it read the body, which names no fault
            return
        if page.status == HTTPStatus.NOT_FOUND and page.error.code != "fault_injection_is_off":
            what = f"{self._base_url} has no POST {PATH}; start it with `loong serve --allow-fault-injection`"
        else:
            what = f"{self._base_url}{PATH} answers with HTTP {page.status}: {_message(page)}"
        raise ServerUnusableError(what)

    async def inject(self, kind: FaultKind, pause_time: float) -> Injected:
        """Inject a fault, and return what has it.

        Raises:
            FaultRefusedError: it cannot be injected now.
        """
        page = await self._ask("POST", PATH, {"fault": kind.value, "seconds": pause_time})
        if not page.is_ok:
            raise FaultRefusedError(_message(page))
        return msgspec.json.decode(page.body, type=Injected)

    async def totals(self) -> ServerTotals:
        """Return the counts so far."""
        page = await self._ask("GET", "/metrics")
        if not page.is_ok:
            return ServerTotals()
        values: dict[str, int] = {}
        for family in text_string_to_metric_families(page.body.decode(errors="replace")):
            for sample in family.samples:
                values[sample.name] = values.get(sample.name, 0) + round(sample.value)
        return ServerTotals(
            values.get("loong:instance_losses_total"),
            values.get("loong:instance_joins_total"),
            values.get("process_resident_memory_bytes"),
            values.get("process_open_fds"),
            values.get("loong:engine_losses_total"),
            values.get("loong:requests_taken_over_total"),
        )

    async def health(self) -> str:
        """Return the status: ok, degraded, or the reason why it cannot serve."""
        page = await self._ask("GET", "/health")
        if not page.is_ok:
            return f"dead: {_message(page)}"
        return msgspec.json.decode(page.body, type=_Health).status

    async def _ask(self, method: str, path: str, body: object = None) -> Page:
        try:
            return await self._client.ask_async(method, path, body)
        except UnreachableError as error:
            raise ServerUnusableError(f"no server answers at {self._base_url}: {error}") from error


def _message(page: Page) -> str:
    return page.error.message or "no message"
