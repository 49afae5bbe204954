"""The server under faults: its faults, its counts and its health."""

from dataclasses import dataclass
from http import HTTPStatus
from types import TracebackType
from typing import Self

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from loong.engine.faults import FaultKind
from loong.foreign_json import NOT_JSON
from loong.workloads.errors import ServerUnusableError

PATH = "/admin/faults"
TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class ServerTotals:
    """Counts of a server since its start, and what its engine's process uses; None: not reported."""

    num_losses: int | None = None
    num_joins: int | None = None
    num_memory_bytes: int | None = None
    num_descriptors: int | None = None


class FaultRefusedError(Exception):
    """The server could not inject a fault now."""


class _Error(msgspec.Struct):
    message: str = "no message"
    code: str = ""


class _Refused(msgspec.Struct):
    error: _Error = msgspec.field(default_factory=_Error)


class _Injected(msgspec.Struct):
    instance: int


class _Health(msgspec.Struct):
    status: str


class FaultyServer:
    """A server with `--allow-fault-injection`, for an `async with`. `key` is its admin key if it has one."""

    def __init__(self, base_url: str, key: str | None) -> None:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
        self._base_url = base_url
        self._session = aiohttp.ClientSession(headers=headers, timeout=timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def check_faults(self) -> None:
        """Raise `ServerUnusableError` unless the server injects faults. None is injected."""
        status, page = await self._ask("POST", PATH, {})
        if status == HTTPStatus.BAD_REQUEST:  # it read the body, which names no fault
            return
        error = _error_of(page)
        if status == HTTPStatus.NOT_FOUND and error.code != "fault_injection_is_off":
            what = f"{self._base_url} has no POST {PATH}; start it with `loong serve --allow-fault-injection`"
        else:
            what = f"{self._base_url}{PATH} answers with HTTP {status}: {error.message}"
        raise ServerUnusableError(what)

    async def inject(self, kind: FaultKind, pause_time: float) -> int:
        """Inject a fault, and return the instance that has it.

        Raises:
            FaultRefusedError: it cannot be injected now.
        """
        status, page = await self._ask("POST", PATH, {"fault": kind.value, "seconds": pause_time})
        if status != HTTPStatus.OK:
            raise FaultRefusedError(_error_of(page).message)
        return msgspec.json.decode(page, type=_Injected).instance

    async def totals(self) -> ServerTotals:
        """Return the counts so far."""
        status, page = await self._ask("GET", "/metrics")
        if status != HTTPStatus.OK:
            return ServerTotals()
        values: dict[str, int] = {}
        for family in text_string_to_metric_families(page.decode(errors="replace")):
            for sample in family.samples:
                values[sample.name] = values.get(sample.name, 0) + round(sample.value)
        return ServerTotals(
            values.get("loong:instance_losses_total"),
            values.get("loong:instance_joins_total"),
            values.get("process_resident_memory_bytes"),
            values.get("process_open_fds"),
        )

    async def health(self) -> str:
        """Return the status: ok, degraded, or the reason why it cannot serve."""
        status, page = await self._ask("GET", "/health")
        if status != HTTPStatus.OK:
            return f"dead: {_error_of(page).message}"
        return msgspec.json.decode(page, type=_Health).status

    async def _ask(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        try:
            async with self._session.request(method, f"{self._base_url}{path}", json=body) as answer:
                return answer.status, await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ServerUnusableError(f"no server answers at {self._base_url}: {error}") from error


def _error_of(page: bytes) -> _Error:
    try:
        return msgspec.json.decode(page, type=_Refused).error
    except NOT_JSON:
        return _Error()
