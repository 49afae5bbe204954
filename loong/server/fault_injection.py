"""`/admin/faults`: kills or stops the workers of an instance, on a server that allows it."""

from typing import Literal

from aiohttp import web
from pydantic import Field

from loong.core.errors import InvalidRequestError
from loong.engine.faults import FaultKind
from loong.server.answers.status import InjectedFault
from loong.server.api.body import Bodies
from loong.server.api.errors import ApiError
from loong.server.api.json_bodies import json_response
from loong.server.api.parsing import check, read_json
from loong.server.api.schema_base import Schema
from loong.server.cluster import CLUSTER

MAX_PAUSE_SECONDS = 3600.0
MAX_INSTANCE_ID = 65_535


class FaultFields(Schema):
    """A fault to inject."""

    fault: Literal["kill", "pause"]
    """kill: SIGKILL to the instance's processes. pause: SIGSTOP, and SIGCONT after `seconds`."""
    instance: int | None = Field(default=None, ge=0, le=MAX_INSTANCE_ID)
    """The instance; otherwise the live one whose last fault is the longest ago."""
    seconds: float = Field(default=25.0, ge=0, le=MAX_PAUSE_SECONDS)
    """Length of a pause. A worker that is silent for 20 s is lost."""


async def inject_fault(http: web.Request) -> web.Response:
    """Inject a fault, and return the instance that has it."""
    cluster = http.app[CLUSTER]
    if cluster.faults is None:
        raise ApiError(
            404, "the server was started without --allow-fault-injection", "fault_injection_is_off"
        )
    async with Bodies(cluster.settings).receive(http) as body:
        fields = check(read_json(body), FaultFields)
    try:
        kind = FaultKind(fields.fault)
        instance_id = cluster.faults.inject(kind, fields.instance, fields.seconds)
    except InvalidRequestError as error:
        raise ApiError(409, str(error), "instance_not_live", error.param) from error
    return json_response(InjectedFault(kind, instance_id))
