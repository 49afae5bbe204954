"""Faults that an operator injects into the workers of a server, to see that requests outlive them."""

import asyncio
import signal
from collections.abc import Callable, Collection, Sequence
from enum import Enum

from loong.core.errors import InvalidRequestError
from loong.core.placement import InstanceId
from loong.executor.recovery import SendSignal


class FaultKind(Enum):
    """A fault: the processes of an instance are killed, or stopped for some time."""

    KILL = "kill"
    PAUSE = "pause"


class WorkerFaults:
    """Faults of live instances. Without a named instance, that whose last fault is the longest ago has it.

    `processes_of` returns how the present processes of an instance are sent signals.
    """

    def __init__(
        self,
        processes_of: Callable[[InstanceId], Sequence[SendSignal]],
        live_ids: Callable[[], Collection[InstanceId]],
    ) -> None:
        self._processes_of, self._live_ids = processes_of, live_ids
        self._in_turn: list[InstanceId] = []  # instances that had a fault, the last one at the end

    def inject(self, kind: FaultKind, instance_id: InstanceId | None, seconds: float) -> InstanceId:
        """Kill an instance, or stop it for some seconds; return it.

        Raises `InvalidRequestError` if the instance is not live, or none is.
        """
        chosen_id = self._choose(instance_id)
        processes = self._processes_of(chosen_id)
        for send in processes:
            send(signal.SIGKILL if kind is FaultKind.KILL else signal.SIGSTOP)
        if kind is FaultKind.PAUSE:
            loop = asyncio.get_running_loop()
            for send in processes:
                loop.call_later(seconds, send, signal.SIGCONT)
        return chosen_id

    def _choose(self, instance_id: InstanceId | None) -> InstanceId:
        live = sorted(self._live_ids())
        if instance_id is None:
            if not live:
                raise InvalidRequestError("no instance is live now", param="instance")
            instance_id = min(live, key=lambda i: self._in_turn.index(i) if i in self._in_turn else -1)
        elif instance_id not in live:
            raise InvalidRequestError(
                f"instance {instance_id} is not live; live are {live}", param="instance"
            )
        self._in_turn = [*(i for i in self._in_turn if i != instance_id), instance_id]
        return instance_id
