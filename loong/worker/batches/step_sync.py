"""Messages of a group's instances to each other, and to holders, at a decode step boundary."""

from collections.abc import Iterable

import torch

from loong.core.placement import InstanceId
from loong.core.plan import BatchPlan
from loong.core.request import RequestId
from loong.fabric.protocol import Exchanging, OpenBatch
from loong.fabric.traffic import Channel
from loong.worker.batches.lease_ends import LeaseTerm


def sync_step(
    batch: OpenBatch,
    plan: BatchPlan,
    ended: Iterable[RequestId],
    live: set[RequestId],
    lease_end: LeaseTerm,
) -> int:
    """Drop from `live` the requests that ended anywhere in the group; `ended` are those that did so here.

    Returns the step before which the group's leader ends the lease, from its `lease_end`.
    """
    request_ids = plan.request_ids
    payload = torch.zeros(1 + len(request_ids), dtype=torch.int64)
    payload[0] = lease_end.step()
    for request_id in ended:
        payload[1 + request_ids.index(request_id)] = 1
    payloads = batch.exchange_control(plan.group.instance_ids, payload)
    for instance_payload in payloads.values():
        live.difference_update(
            request_id
            for request_id, has_ended in zip(request_ids, instance_payload[1:].tolist(), strict=True)
            if has_ended
        )
    return int(payloads[plan.group.leader_id][0])


def report_to_holders(
    batch: Exchanging, plan: BatchPlan, holder_ids: Iterable[InstanceId], live: set[RequestId], stop: int
) -> None:
    """Send the live requests and the lease's end to the instances that serve it; only as its leader."""
    payload = torch.tensor([stop, *(request_id in live for request_id in plan.request_ids)])
    batch.exchange(dict.fromkeys(holder_ids, payload), {}, Channel.CONTROL).wait()


def hear_step(members: Exchanging, plan: BatchPlan, live: set[RequestId]) -> int:
    """Drop from `live` what the leader of a served lease says has ended; return before which step it ends."""
    payload = torch.empty(1 + len(plan.request_ids), dtype=torch.int64)
    members.exchange({}, {plan.group.leader_id: payload}, Channel.CONTROL).wait()
    stop, *are_live = payload.tolist()
    live.intersection_update(r for r, is_live in zip(plan.request_ids, are_live, strict=True) if is_live)
    return int(stop)
