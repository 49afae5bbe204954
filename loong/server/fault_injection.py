"""`/admin/faults`: kills or stops the workers of an instance, on a server that allows it."""

from typing import Literal

from aiohttp import web
from pydantic import Field

from loong.core.errors import InvalidRequestError
from loong.engine.faults import NO_MANAGER, ONE_ENGINE, FaultKind
from loong.server.answers.status import InjectedFault
from loong.server.api.body import Bodies
from loong.server.api.errors import ApiError, bad_request
from loong.server.api.json_bodies import json_response
from loong.server.api.parsing import check, read_json
from loong.server.api.schema_base import Schema
from loong.server.cluster import CLUSTER

MAX_PAUSE_SECONDS = 3600.0
MAX_INSTANCE_ID = 65_535
MAX_ENGINE_ID = 65_535


class FaultFields(Schema):
    """A fault to inject."""

    fault: Literal["kill", "pause", "kill_engine", "kill_manager"]
    """kill: SIGKILL to the instance's processes. pause: SIGSTOP, and SIGCONT after `seconds`. kill_engine:
    SIGKILL to the process of an engine, if there are several. kill_manager: to that which knows which of them
    has room to lend."""
    engine: int | None = Field(default=None, ge=0, le=MAX_ENGINE_ID)
    """The engine, if there are several; otherwise the live one whose last fault is the longest ago."""
    instance: int | None = Field(default=None, ge=0, le=MAX_INSTANCE_ID)
    """The instance; otherwise the live one whose last fault is the longest ago."""
    seconds: float = Field(default=25.0, ge=0, le=MAX_PAUSE_SECONDS)
    """Length of a pause. A worker that is silent for 20 s is lost."""


def check_allowed(*, is_allowed: bool) -> None:
    """Raise a 404 unless faults may be injected."""
    if not is_allowed:
        raise ApiError(
            404, "the server was started without --allow-fault-injection", "fault_injection_is_off"
        )


def not_live(error: InvalidRequestError) -> ApiError:
    """Return the error of a fault for which nothing is live."""
    return ApiError(409, str(error), f"{error.param}_not_live", error.param)


async def inject_fault(http: web.Request) -> web.Response:
    """Inject a fault, and return the instance that has it."""
    cluster = http.app[CLUSTER]
    check_allowed(is_allowed=cluster.faults is not None)
    assert cluster.faults is not None, "they are allowed"
    async with Bodies(cluster.settings).receive(http) as body:
        fields = check(read_json(body), FaultFields)
    kind = FaultKind(fields.fault)
    if kind is FaultKind.KILL_MANAGER:
        raise bad_request(NO_MANAGER, "fault")
    if fields.engine or kind is FaultKind.KILL_ENGINE:
        raise bad_request(ONE_ENGINE, "engine" if fields.engine else "fault")
    try:
        instance_id = cluster.faults.inject(kind, fields.instance, fields.seconds)
    except InvalidRequestError as error:
        raise not_live(error) from error
    return json_response(InjectedFault(kind, instance=instance_id))
