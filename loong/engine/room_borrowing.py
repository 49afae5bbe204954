"""Room that an engine borrows: memory instances, from the search for them until they are given back."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from loong.core.instance import ElasticInstance, InstanceKind
from loong.core.placement import InstanceId
from loong.core.request import RequestId
from loong.core.snapshot import Snapshot
from loong.engine.room_need import bound_ids, is_needless, room_need
from loong.executor.room_workers import RoomRequest, RoomWorkers
from loong.executor.workers import WorkersExecutor
from loong.lending.engine_room import EngineRoom, Loan
from loong.lending.messages import Envelope

logger = logging.getLogger(__name__)

LACKING_SECONDS = 0.2  # before an engine borrows: what ends soon may free the room
NEEDLESS_SECONDS = 2.0  # before it gives room back, which may soon be needed again
START_SECONDS = 60.0  # for the workers of a loan


class RoomBorrowing:
    """The loans that an engine asks for and uses; see `RoomLending` for the arguments."""

    def __init__(
        self,
        room: EngineRoom,
        executor: WorkersExecutor,
        workers: RoomWorkers,
        loan_ids: Sequence[InstanceId],
        snapshot: Callable[[], Snapshot],
        send: Callable[[Sequence[Envelope]], None],
    ) -> None:
        self.room, self._executor = room, executor
        self._workers, self._loan_ids = workers, loan_ids
        self._snapshot, self._send = snapshot, send
        self._requests: dict[str, tuple[InstanceId, RoomRequest]] = {}  # loans that are asked or borrowed
        self._lacking_since: float | None = None
        self._needless_since: dict[InstanceId, float] = {}
        self._wanted_back: dict[str, frozenset[RequestId]] = {}  # loans, with who could not go on without it

    def tick(self, snapshot: Snapshot) -> None:
        """Borrow what is lacking, and give back what is needless or wanted back."""
        now = self._executor.now
        self._give_back_wanted(snapshot)
        need = room_need(self._without_wanted(snapshot), self._num_coming(snapshot))
        if need is None:
            self._lacking_since = None
        elif self._lacking_since is None:
            self._lacking_since = now
        elif now >= self._lacking_since + LACKING_SECONDS:
            self._send(self.room.borrow(need, now))
        for loan in list(self.room.borrowed.values()):
            instance_id, _ = self._requests[loan.loan_id]
            if instance_id not in snapshot.instance and now > loan.since + START_SECONDS:
                self._send(self.room.returned(loan.loan_id, now))
                self.drop(loan, f"it was not ready within {START_SECONDS:g} s")
            elif not is_needless(snapshot, instance_id):
                self._needless_since.pop(instance_id, None)
            elif now >= self._needless_since.setdefault(instance_id, now) + NEEDLESS_SECONDS:
                self._drain(loan, "the engine has room of its own again")

    def ask(self, loan: Loan) -> tuple[str, ...] | None:
        """See EngineHost."""
        borrowed = self.room.borrowed.keys()
        self._requests = {i: found for i, found in self._requests.items() if i in borrowed}
        members, used = self._executor.members, {i for i, _ in self._requests.values()}
        used |= members.borrowed.keys() | members.joined | members.lost
        free = [i for i in self._loan_ids if i not in used]
        if not free:
            return None
        request = self._workers.request(free[0])
        self._requests[loan.loan_id] = free[0], request
        return request.configs

    def use(self, loan: Loan) -> None:
        """See EngineHost."""
        instance_id, request = self._requests[loan.loan_id]
        reason = f"engine {loan.creditor_id} lends {loan.num_tokens} tokens of room: {loan.reason}"
        num_ranks = len(request.configs)
        instance = ElasticInstance(
            instance_id, num_ranks, InstanceKind.ATTENTION, loan.num_tokens, host_id=request.host_id
        )
        logger.info("instance %d: %s", instance_id, reason)
        self._executor.members.borrow(instance, reason, request.commands)

    def drop(self, loan: Loan, reason: str) -> None:
        """See EngineHost."""
        instance_id, _ = self._requests.pop(loan.loan_id)
        for worker_id in self._executor.members.endpoints.workers_of(instance_id):
            self._executor.lose(worker_id, reason)

    def give_back(self, loan: Loan) -> None:
        """See EngineHost: a request that fits only with the loan keeps it until its end, or until another."""
        if loan.loan_id not in self._wanted_back:
            instance_id, _ = self._requests[loan.loan_id]
            self._wanted_back[loan.loan_id] = bound_ids(self._snapshot(), instance_id)

    def see_left(self, instance_id: InstanceId) -> None:
        """Forget the loan of an instance that has left."""
        for loan_id in [i for i, (borrowed_id, _) in self._requests.items() if borrowed_id == instance_id]:
            del self._requests[loan_id]
            self._needless_since.pop(instance_id, None)
            self._send(self.room.returned(loan_id, self._executor.now))

    def _drain(self, loan: Loan, reason: str) -> None:
        instance_id, _ = self._requests[loan.loan_id]
        instance = self._snapshot().instance.get(instance_id)
        if instance is not None and not instance.is_draining:
            logger.info(
                "instance %d gives its room back to engine %d: %s", instance_id, loan.creditor_id, reason
            )
            self._executor.members.drain(instance_id, reason)

    def _give_back_wanted(self, snapshot: Snapshot) -> None:
        """Empty the loans that creditors need, once no request is left that could not go on without."""
        live_ids = snapshot.request.keys()
        self._wanted_back = {i: ids for i, ids in self._wanted_back.items() if i in self.room.borrowed}
        for loan_id, request_ids in self._wanted_back.items():
            loan = self.room.borrowed[loan_id]
            bound = bound_ids(snapshot, self._requests[loan_id][0])
            if not request_ids & live_ids & bound:
                self._drain(loan, f"engine {loan.creditor_id} needs its room back")

    def _without_wanted(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot without the loans that are wanted back."""
        gone_ids = {self._requests[loan_id][0] for loan_id in self._wanted_back}
        if not gone_ids:
            return snapshot
        return replace(
            snapshot, instances=tuple(i for i in snapshot.instances if i.instance_id not in gone_ids)
        )

    def _num_coming(self, snapshot: Snapshot) -> int:
        """Return the tokens of loans whose workers are not ready."""
        loans = self.room.borrowed.values()
        return sum(
            loan.num_tokens for loan in loans if self._requests[loan.loan_id][0] not in snapshot.instance
        )
