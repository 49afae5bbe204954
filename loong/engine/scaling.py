"""The number of instances that an operator asks for, and the change towards it while requests are served."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from loong.core.errors import (
    ClusterError,
    ConfigError,
    EngineStoppedError,
    InvalidRequestError,
    RequestTooLargeError,
)
from loong.core.events import Event
from loong.core.instructions import Instruction
from loong.core.observer import Observer
from loong.core.placement import InstanceId
from loong.core.plan import IterationPlan
from loong.core.snapshot import Snapshot
from loong.engine.cluster_size import NO_MEMORY, ClusterSize, MemoryNumbers, size_of, wanted_ids
from loong.executor.membership import Membership

logger = logging.getLogger(__name__)


class Scaling(Observer):
    """Adds and removes instances of a running cluster. It observes the loop.

    Instances 0 to `num_instances` - 1 are wanted, and the first memory instances, whose ids begin with
    `max_instances`. Others drain: the policy empties them, and then they leave. One that is wanted again
    meanwhile still leaves first. `kv_capacity` is that of each instance. `check`
    raises `ConfigError` unless the policy runs that number of instances, and `limit_of` returns the most KV
    of one request on some instances.

    `max_request_kv` is that limit on the instances that are to stay and serve, or are being started again
    after a loss. Those that have yet to join for the first time, drain or are quarantined do not count.
    `report_limit` is called when it changes.
    """

    def __init__(
        self,
        members: Membership,
        num_instances: int,
        max_instances: int,
        kv_capacity: int,
        check: Callable[[int], None],
        limit_of: Callable[[Iterable[InstanceId]], int],
        memory: MemoryNumbers = NO_MEMORY,
    ) -> None:
        self._members, self._kv_capacity = members, kv_capacity
        self._check, self._limit_of = check, limit_of
        self._num_instances, self._max_instances = num_instances, max_instances
        self._memory = memory
        self._counted = self._lasting_ids
        self.max_request_kv = limit_of(sorted(self._counted))
        self.report_limit: Callable[[], None] = lambda: None
        self._waiters: list[asyncio.Future[None]] = []
        self._is_settled = True

    def size(self, snapshot: Snapshot) -> ClusterSize:
        """Return the instances, in the order of their ids."""
        members = self._members
        numbers = self._num_instances, self._max_instances
        size = size_of(
            snapshot, members.wanted, self._kv_capacity, *numbers, members.quarantined, self._memory
        )
        return replace(size, is_changing=not self._is_settled)

    def scale(self, num_instances: int, snapshot: Snapshot, num_memory: int | None = None) -> None:
        """Begin the change to a number of instances, and of memory instances (None: as before).

        Raises:
            InvalidRequestError: there is no room for that number, or the policy does not run it.
            RequestTooLargeError: a live request would never fit.
        """
        memory = self._memory
        if num_memory is not None and not 0 <= num_memory <= memory.max_instances:
            raise InvalidRequestError(
                f"memory_instances must be from 0 to {memory.max_instances}, which is --memory-instances of "
                f"`loong serve`, but is {num_memory}",
                param="memory_instances",
            )
        if not 1 <= num_instances <= self._max_instances:
            raise InvalidRequestError(
                f"num_instances must be from 1 to {self._max_instances}, which is --max-instances of "
                f"`loong serve`, but is {num_instances}",
                param="num_instances",
            )
        try:
            self._check(num_instances)
        except ConfigError as error:
            raise InvalidRequestError(str(error), param="num_instances") from error
        if num_memory is not None:
            memory = replace(memory, num_instances=num_memory)
        wanted = wanted_ids(num_instances, self._max_instances, memory.num_instances)
        _check_live_requests(snapshot, num_instances, self._limit_of(sorted(wanted)))
        logger.info("instances: %d are wanted instead of %d", num_instances, self._num_instances)
        if memory != self._memory:
            logger.info(
                "memory instances: %d are wanted instead of %d",
                memory.num_instances,
                self._memory.num_instances,
            )
        self._num_instances, self._memory, self._is_settled = num_instances, memory, False
        self._members.release(wanted)
        self._advance(snapshot)
        self._update_limit()

    async def wait(self) -> None:
        """Wait until the instances that are asked for serve, and no others are left.

        Raises `EngineStoppedError` if the engine stops before, and `ClusterError` if one is quarantined.
        """
        if not self._is_settled:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def stop(self) -> None:
        """Let all that wait for a change fail, because the engine has stopped."""
        self._answer(EngineStoppedError())

    def on_plan(
        self,
        _events: Sequence[Event],
        snapshot: Snapshot,
        _plan: IterationPlan,
        _instructions: Sequence[Instruction],
        /,
    ) -> None:
        """Continue a change. An instance that was empty before a plan is so after it."""
        if not self._is_settled:
            self._advance(snapshot)
        self._update_limit()

    def _advance(self, snapshot: Snapshot) -> None:
        members = self._members
        wanted = wanted_ids(self._num_instances, self._max_instances, self._memory.num_instances)
        if failed := sorted(wanted & members.quarantined):
            self._is_settled = True
            self._answer(ClusterError(f"instances {failed} do not start, and are quarantined"))
            return
        for instance_id in sorted(members.wanted - wanted, reverse=True):
            members.drain(instance_id)
        members.end_drained(snapshot.drained_ids)
        for instance_id in sorted(wanted - members.wanted - members.joined):
            members.add(instance_id)
        own_ids = members.joined - members.borrowed.keys()
        self._is_settled = own_ids == members.wanted == wanted  # which the snapshot may show later
        self._is_settled = self.size(snapshot).is_done
        if self._is_settled:
            logger.info("instances: %d serve, as wanted", self._num_instances)
            self._answer(None)

    @property
    def _lasting_ids(self) -> set[InstanceId]:
        members = self._members
        return members.wanted & (members.joined | members.lost)

    def _update_limit(self) -> None:
        """Count the instances again, unless none is left: then the engine ends."""
        lasting_ids = self._lasting_ids
        if lasting_ids in (self._counted, set()):
            return
        self._counted = lasting_ids
        limit = self._limit_of(sorted(lasting_ids))
        if limit != self.max_request_kv:
            logger.info("a request can have KV for %d tokens instead of %d", limit, self.max_request_kv)
            self.max_request_kv = limit
            self.report_limit()

    def _answer(self, error: ClusterError | None) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if waiter.done():
                continue  # its client has left
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)


def _check_live_requests(snapshot: Snapshot, num_instances: int, limit: int) -> None:
    views = (*snapshot.waiting, *snapshot.following, *snapshot.running)
    live = (view for view in views if not view.has_ended)
    largest = max(live, key=lambda view: view.num_final_tokens, default=None)
    if largest is not None and largest.num_final_tokens > limit:
        raise RequestTooLargeError(
            f"request {largest.request_id} may need KV for {largest.num_final_tokens} tokens, but on "
            f"{num_instances} instances a request can have that of {limit}; wait until it ends, or abort it"
        )
