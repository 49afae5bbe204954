"""Faults that an operator injects into the workers of a server, to see that requests outlive them."""

import asyncio
import signal
from collections.abc import Callable, Collection, Sequence
from enum import Enum

from loong.core.errors import InvalidRequestError
from loong.core.placement import InstanceId
from loong.executor.recovery import SendSignal

NO_MANAGER = "this server has no gManager; it has one with --num-engines and --lend"
ONE_ENGINE = "this server has one engine, which is engine 0 and its own process"


class FaultKind(Enum):
    """A fault: the processes of an instance are killed or stopped, or an engine or the gManager is killed."""

    KILL = "kill"
    PAUSE = "pause"
    KILL_ENGINE = "kill_engine"
    KILL_MANAGER = "kill_manager"


class InTurn:
    """Chooses what has the next fault: among the live ones that whose last fault is the longest ago."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._in_turn: list[int] = []  # ids that had a fault, the last one at the end

    def choose(self, named_id: int | None, live_ids: Collection[int]) -> int:
        """Return the one that is named, or else the next.

        Raises `InvalidRequestError` if it is not live, or none is.
        """
        what, live = self._what, sorted(live_ids)
        if named_id is None:
            if not live:
                raise InvalidRequestError(f"no {what} is live now", param=what)
            named_id = min(live, key=lambda i: self._in_turn.index(i) if i in self._in_turn else -1)
        elif named_id not in live:
            raise InvalidRequestError(f"{what} {named_id} is not live; live are {live}", param=what)
        self._in_turn = [*(i for i in self._in_turn if i != named_id), named_id]
        return named_id


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
        self._in_turn = InTurn("instance")

    def inject(self, kind: FaultKind, instance_id: InstanceId | None, seconds: float) -> InstanceId:
        """Kill an instance, or stop it for some seconds; return it.

        Raises `InvalidRequestError` if the instance is not live, or none is.
        """
        chosen_id = self._in_turn.choose(instance_id, self._live_ids())
        processes = self._processes_of(chosen_id)
        for send in processes:
            send(signal.SIGKILL if kind is FaultKind.KILL else signal.SIGSTOP)
        if kind is FaultKind.PAUSE:
            loop = asyncio.get_running_loop()
            for send in processes:
                loop.call_later(seconds, send, signal.SIGCONT)
        return chosen_id
