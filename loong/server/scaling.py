"""`/admin/instances` and `/admin/scale`: the instances of the cluster, and a new number of them."""

from aiohttp import web
from pydantic import Field

from loong.engine.cluster_size import ClusterSize
from loong.server.answers.status import Instance, Instances
from loong.server.api.body import Bodies
from loong.server.api.errors import ApiError, bad_request
from loong.server.api.json_bodies import json_response
from loong.server.api.parsing import check, read_json
from loong.server.api.schema_base import Schema
from loong.server.cluster import CLUSTER

MAX_INSTANCES = 65_536
_TRUTHS = {"true": True, "1": True, "false": False, "0": False}


class ScaleFields(Schema):
    """The numbers of instances that are to serve."""

    num_instances: int = Field(ge=1, le=MAX_INSTANCES)
    """Instances, from 1 to `--max-instances`. Those of the highest ids leave, once they are empty."""
    memory_instances: int | None = Field(default=None, ge=0, le=MAX_INSTANCES)
    """Memory instances, from 0 to `--memory-instances` (as many as before)."""


async def instances(http: web.Request) -> web.Response:
    """Return the instances and their states."""
    _check_engine(http)
    return json_response(_answer(http.app[CLUSTER].engine.size()))


async def scale(http: web.Request) -> web.Response:
    """Begin to change the number of instances, and with `wait=true` wait until it has changed.

    A client that leaves does not end the change.
    """
    _check_engine(http)
    cluster = http.app[CLUSTER]
    is_waiting = _is_waiting(http.query.get("wait", "false"))
    async with Bodies(cluster.settings).receive(http) as body:
        fields = check(read_json(body), ScaleFields)
    num_instances = fields.num_instances
    cluster.engine.scale(num_instances, fields.memory_instances)
    if is_waiting:
        await cluster.engine.wait_for_size()
        if (asked := cluster.engine.size().num_instances) != num_instances:
            raise ApiError(409, f"meanwhile, {asked} instances were asked for", "scaled_again")
    return json_response(_answer(cluster.engine.size()))


def _check_engine(http: web.Request) -> None:
    if (named := http.query.get("engine", "0")) != "0":
        raise bad_request(f"there is no engine {named!r}: this server has one, 0", "engine")


def _is_waiting(given: str) -> bool:
    if given not in _TRUTHS:
        raise bad_request("wait must be true or false", "wait")
    return _TRUTHS[given]


def _answer(size: ClusterSize) -> Instances:
    instances = [Instance(i.instance_id, i.state, i.kv_used, i.kv_capacity, i.kind) for i in size.instances]
    return Instances(
        size.num_instances, size.max_instances, size.memory.num_instances, size.is_done, instances
    )
