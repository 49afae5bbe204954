"""The lines of a recording, one JSON object each: the setting, then events and the plans made on them.

JSON has no infinity, so an infinite limit is written as "inf".
"""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from math import inf
from typing import Any, TypeAlias, assert_never

import msgspec

from loong.core.events import (
    BatchEndPredicted,
    BatchFinished,
    BatchStarted,
    Event,
    InstanceDraining,
    InstanceJoined,
    InstanceLeft,
    InstanceLost,
    MigrationFinished,
    PrefixCacheReset,
    RequestAborted,
    RequestArrived,
    TokensProduced,
)
from loong.core.instance import ElasticInstance
from loong.core.plan import IterationPlan
from loong.core.request import SLO, Request, SamplingParams
from loong.core.snapshot import Snapshot
from loong.scheduler.config import PolicyConfig
from loong.scheduler.cost.cost_model import WorkCostModel

VERSION = 8


class _Line(msgspec.Struct, frozen=True, tag_field="line", omit_defaults=True, forbid_unknown_fields=True):
    """The base of all lines."""


class Setting(_Line, frozen=True, tag="setting"):
    """The inputs of plans besides events. Corrections of the cost model follow from the events."""

    version: int
    loong_version: str
    instances: tuple[ElasticInstance, ...]
    policy: str
    policy_config: PolicyConfig
    cost_model: WorkCostModel
    is_recalibrated: bool = False
    last_id: int = 0  # of batches and migrations before the first event
    keeps_prefixes: bool = False


class ArrivalRecord(_Line, frozen=True, tag="request_arrived"):
    """A request. The ids of its prompt are kept only on demand; plans depend on them with a prefix cache."""

    time: float
    request_id: str
    num_prompt_tokens: int
    sampling_params: SamplingParams
    arrival_time: float
    slo: SLO | None = None
    user: str = ""
    prompt_token_ids: list[int] | None = None
    priority: int = 0
    num_choices: int = 1
    num_prompt_logprobs: int | None = None
    cache_salt: str = ""
    uses_cache: bool = True


class TokensRecord(_Line, frozen=True, tag="tokens_produced"):
    """Produced tokens, without log probabilities."""

    event: TokensProduced


class BatchStartRecord(_Line, frozen=True, tag="batch_started"):
    """A batch has started."""

    event: BatchStarted


class PredictedEndRecord(_Line, frozen=True, tag="batch_end_predicted"):
    """The end of a batch is predicted."""

    event: BatchEndPredicted


class BatchEndRecord(_Line, frozen=True, tag="batch_finished"):
    """A batch has ended."""

    event: BatchFinished


class MigrationRecord(_Line, frozen=True, tag="migration_finished"):
    """A migration has ended."""

    event: MigrationFinished


class AbortRecord(_Line, frozen=True, tag="request_aborted"):
    """A request was aborted."""

    event: RequestAborted


class InstanceLossRecord(_Line, frozen=True, tag="instance_lost"):
    """An instance was lost."""

    event: InstanceLost


class InstanceJoinRecord(_Line, frozen=True, tag="instance_joined"):
    """An instance joined."""

    event: InstanceJoined


class InstanceDrainRecord(_Line, frozen=True, tag="instance_draining"):
    """An instance is to leave."""

    event: InstanceDraining


class InstanceLeaveRecord(_Line, frozen=True, tag="instance_left"):
    """An instance left."""

    event: InstanceLeft


class PrefixCacheResetRecord(_Line, frozen=True, tag="prefix_cache_reset"):
    """The cached KV was evicted."""

    event: PrefixCacheReset


class PlanRecord(_Line, frozen=True, tag="planned"):
    """A plan on the events before it, without reasons and predictions, which have no effect."""

    digest: str
    plan: msgspec.Raw


class RefusedPlanRecord(_Line, frozen=True, tag="refused"):
    """A plan that was refused, with its snapshot and the error."""

    error: str
    snapshot: Snapshot
    plan: IterationPlan


EventLine: TypeAlias = (
    ArrivalRecord
    | BatchStartRecord
    | TokensRecord
    | PredictedEndRecord
    | BatchEndRecord
    | MigrationRecord
    | AbortRecord
    | InstanceLossRecord
    | InstanceJoinRecord
    | InstanceDrainRecord
    | InstanceLeaveRecord
    | PrefixCacheResetRecord
)
Line: TypeAlias = Setting | EventLine | PlanRecord | RefusedPlanRecord


def encoded(line: Line) -> bytes:
    """Return a line as bytes, without the line break."""
    if isinstance(line, Setting | ArrivalRecord | RefusedPlanRecord):  # only these have limits
        return _encoder.encode(_with_words(msgspec.to_builtins(line, enc_hook=_encode_range, str_keys=True)))
    return _encoder.encode(line)


def decoded(text: bytes) -> Line:
    """Return the line that `encoded` wrote.

    Raises `msgspec.DecodeError` or `UnicodeDecodeError` for other bytes.
    """
    return _decoder.decode(text)


def event_line(event: Event, *, keeps_prompts: bool) -> EventLine:
    """Return an event as a line."""
    match event:
        case RequestArrived():
            return _arrived(event, keeps_prompts=keeps_prompts)
        case TokensProduced():
            tokens = tuple(token._replace(logprobs=None) for token in event.tokens)
            return TokensRecord(replace(event, tokens=tokens))
        case BatchStarted():
            return BatchStartRecord(event)
        case BatchEndPredicted():
            return PredictedEndRecord(event)
        case BatchFinished():
            return BatchEndRecord(event)
        case MigrationFinished():
            return MigrationRecord(event)
        case RequestAborted():
            return AbortRecord(event)
        case InstanceLost():
            return InstanceLossRecord(event)
        case InstanceJoined():
            return InstanceJoinRecord(event)
        case InstanceDraining():
            return InstanceDrainRecord(event)
        case InstanceLeft():
            return InstanceLeaveRecord(event)
        case PrefixCacheReset():
            return PrefixCacheResetRecord(event)
        case _:
            assert_never(event)


def event_of(line: EventLine) -> Event:
    """Return a line as an event. A prompt whose ids were not kept has its length."""
    if not isinstance(line, ArrivalRecord):
        return line.event
    prompt: Sequence[int] = range(line.num_prompt_tokens)
    if line.prompt_token_ids is not None:
        prompt = tuple(line.prompt_token_ids)
    request = Request(
        line.request_id,
        prompt,
        line.sampling_params,
        line.slo,
        line.user,
        arrival_time=line.arrival_time,
        priority=line.priority,
        num_choices=line.num_choices,
        num_prompt_logprobs=line.num_prompt_logprobs,
        cache_salt=line.cache_salt,
        uses_cache=line.uses_cache,
    )
    return RequestArrived(line.time, request)


def planned_line(plan: IterationPlan) -> PlanRecord:
    """Return a plan as a line. Equal plans have equal digests everywhere."""
    batches = tuple(replace(batch, predicted_time=None) for batch in plan.batches)
    fields: object = replace(plan, batches=batches, decisions=())
    if plan.preemptions:
        fields = _without_reasons(msgspec.to_builtins(fields, enc_hook=_encode_range))
    text = _plan_encoder.encode(fields)
    return PlanRecord(blake2b(text, digest_size=8).hexdigest(), msgspec.Raw(text))


def _without_reasons(plan: dict[str, Any]) -> dict[str, Any]:
    """Return a plan without the reasons of its preemptions."""
    return {**plan, "preemptions": [{"request_id": one["request_id"]} for one in plan["preemptions"]]}


def _arrived(event: RequestArrived, *, keeps_prompts: bool) -> ArrivalRecord:
    request = event.request
    return ArrivalRecord(
        event.time,
        request.request_id,
        len(request.prompt_token_ids),
        request.sampling_params,
        request.arrival_time,
        request.slo,
        request.user,
        list(request.prompt_token_ids) if keeps_prompts else None,
        request.priority,
        request.num_choices,
        request.num_prompt_logprobs,
        request.cache_salt,
        request.uses_cache,
    )


def _with_words(fields: object) -> object:
    """Return the value with words for infinities, also in nested objects."""
    if isinstance(fields, dict):
        return {name: _with_words(field) for name, field in fields.items()}
    if isinstance(fields, list | tuple):
        return [_with_words(field) for field in fields]
    return "inf" if fields == inf else fields


def _encode_range(value: object) -> str:
    if isinstance(value, range):
        return f"{value.start}:{value.stop}:{value.step}"
    raise TypeError(f"{type(value).__name__} is not recorded")


def _decode_range(kind: type, value: str) -> object:
    if kind is range:
        return range(*map(int, value.split(":")))
    raise TypeError(f"{kind.__name__} is not recorded")


_encoder = msgspec.json.Encoder()
_plan_encoder = msgspec.json.Encoder(enc_hook=_encode_range)
_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(
    Line, dec_hook=_decode_range, strict=False
)  # lax: words may stand for numbers
