"""Events of the cluster, in the order in which they are reported. Times are seconds of the executor."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from loong.core.instance import ElasticInstance
from loong.core.placement import InstanceId
from loong.core.request import FinishReason, Request, RequestId, TokenId
from loong.core.value import value


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural-log probabilities at one position: of the token chosen, and of the likeliest."""

    chosen: float
    top: tuple[tuple[TokenId, float], ...] = ()


class ProducedToken(NamedTuple):
    """One output token, and the reason if its request ends with it. A tuple, which decodes fastest."""

    request_id: RequestId
    token_id: TokenId
    finish_reason: FinishReason | None = None
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A client sent a request."""

    time: float
    request: Request


@dataclass(frozen=True, slots=True)
class BatchStarted:
    """All instances of a batch's group have begun it, or one has finished its part or was lost in it.

    Its tokens and its end come later, and so do the starts of later batches on its instances.
    """

    time: float
    batch_id: int


@value
class TokensProduced:
    """Some masters of a batch sampled the tokens of one step."""

    time: float
    batch_id: int
    step: int
    tokens: tuple[ProducedToken, ...]


@dataclass(frozen=True, slots=True)
class BatchEndPredicted:
    """A batch is predicted to end at `ends_at`, so that the next one can be planned now."""

    time: float
    batch_id: int
    ends_at: float


@dataclass(frozen=True, slots=True)
class BatchFinished:
    """A batch's whole group has finished it, after `num_steps` steps; its tokens were reported before.

    `seconds` is the time from the start of the last instance to the end of all, by the clock of the workers
    (None: not measured). Reports that wait to be read do not change it.
    """

    time: float
    batch_id: int
    num_steps: int
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class MigrationFinished:
    """A migration has committed, or (`is_committed` false) was rolled back."""

    time: float
    migration_id: int
    is_committed: bool


@dataclass(frozen=True, slots=True)
class RequestAborted:
    """A request is to end now, before the engine ends it.

    Its client left; or its answer is complete, for the `reason` STOP or LENGTH; or (ERROR) another part of
    its client's call failed.
    """

    time: float
    request_id: RequestId
    reason: FinishReason = FinishReason.ABORT


@dataclass(frozen=True, slots=True)
class InstanceLost:
    """An instance died with all its KV; the batches and migrations it took part in are void.

    `void_batch_ids` are other batches that ended with them: those of the same requests, planned behind them.
    With `returns`, its process is started again, and it joins once it is ready.
    """

    time: float
    instance_id: InstanceId
    reason: str = ""
    void_batch_ids: tuple[int, ...] = ()
    returns: bool = False


@dataclass(frozen=True, slots=True)
class InstanceJoined:
    """An instance is ready, with an empty pool. If it is room of another engine, the `reason` says why."""

    time: float
    instance: ElasticInstance
    reason: str = ""


@dataclass(frozen=True, slots=True)
class InstanceDraining:
    """An instance is to leave: from now on it takes nothing new, and its KV goes elsewhere."""

    time: float
    instance_id: InstanceId
    reason: str = ""


@dataclass(frozen=True, slots=True)
class InstanceLeft:
    """An instance left after its draining, with an empty pool; or a lost one does not return."""

    time: float
    instance_id: InstanceId


@dataclass(frozen=True, slots=True)
class RoomLent:
    """Another engine asks for room of an instance: it gets `num_tokens` if these are free, else nothing.

    Cached KV that no request reads makes way. Until `RoomReturned`, the instance has less capacity. The
    `reason` says who asked, and why.
    """

    time: float
    loan_id: str
    instance_id: InstanceId
    num_tokens: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RoomReturned:
    """A loan has ended. Its room is the instance's again, unless the instance has been lost since."""

    time: float
    loan_id: str
    instance_id: InstanceId
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PrefixCacheReset:
    """All KV that no request reads is to be evicted now."""

    time: float


@dataclass(frozen=True, slots=True)
class Drained:
    """There will be no more events."""


Event: TypeAlias = (
    RequestArrived
    | BatchStarted
    | TokensProduced
    | BatchEndPredicted
    | BatchFinished
    | MigrationFinished
    | RequestAborted
    | InstanceLost
    | InstanceJoined
    | InstanceDraining
    | InstanceLeft
    | RoomLent
    | RoomReturned
    | PrefixCacheReset
)


def joined(events: Iterable[Event]) -> list[Event]:
    """Merge consecutive `TokensProduced` of the same step into one event, at the time of the last.

    Applying an event costs as much as some of its tokens.
    """
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if (
            isinstance(event, TokensProduced)
            and isinstance(last, TokensProduced)
            and (event.batch_id, event.step) == (last.batch_id, last.step)
        ):
            found[-1] = TokensProduced(event.time, event.batch_id, event.step, last.tokens + event.tokens)
        else:
            found.append(event)
    return found
