"""The lines of a recording, one JSON object each: the setting, then events and the plans made on them.

An event is written as it is, under its name.

JSON has no infinity, so an infinite limit is written as "inf".
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from math import inf
from typing import Any, TypeAlias, get_args

import msgspec

from loong.core.events import Event, RequestArrived, TokensProduced
from loong.core.instance import ElasticInstance
from loong.core.plan import IterationPlan
from loong.core.request import SLO, Continuation, Request, SamplingParams
from loong.core.snapshot import Snapshot
from loong.core.window_memory import WindowMemory
from loong.scheduler.config import PolicyConfig
from loong.scheduler.cost.cost_model import WorkCostModel

VERSION = 9


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
    least_saved: int | None = None
    windows: WindowMemory | None = None


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
    continues: Continuation | None = None


class _Named(msgspec.Struct):
    """The name of a line, and the event of that name."""

    line: str
    event: msgspec.Raw = msgspec.Raw()


class PlanRecord(_Line, frozen=True, tag="planned"):
    """A plan on the events before it, without reasons and predictions, which have no effect."""

    digest: str
    plan: msgspec.Raw


class RefusedPlanRecord(_Line, frozen=True, tag="refused"):
    """A plan that was refused, with its snapshot and the error."""

    error: str
    snapshot: Snapshot
    plan: IterationPlan


Line: TypeAlias = Setting | Event | PlanRecord | RefusedPlanRecord

_NAMES: Mapping[type[Event], str] = {
    kind: re.sub(r"\B(?=[A-Z])", "_", kind.__name__).lower()
    for kind in get_args(Event)
    if kind is not RequestArrived  # which has a record of its own
}


def encoded(line: Line, *, keeps_prompts: bool = False) -> bytes:
    """Return a line as bytes, without the line break. Log probabilities of tokens are left out."""
    match line:
        case RequestArrived():
            return _with_limits(_arrived(line, keeps_prompts=keeps_prompts))
        case Setting() | RefusedPlanRecord():
            return _with_limits(line)
        case PlanRecord():
            return _encoder.encode(line)
        case TokensProduced():
            tokens = tuple(token._replace(logprobs=None) for token in line.tokens)
            return _named(replace(line, tokens=tokens))
        case _:
            return _named(line)


def decoded(text: bytes) -> Line:
    """Return the line that `encoded` wrote. A prompt whose ids were not kept has its length.

    Raises one of `NOT_JSON` for other bytes.
    """
    named = _name_decoder.decode(text)
    if (decoder := _event_decoders.get(named.line)) is not None:
        return decoder.decode(named.event)
    line = _decoder.decode(text)
    return _arrival(line) if isinstance(line, ArrivalRecord) else line


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


def _named(event: Event) -> bytes:
    return b'{"line":"%b","event":%b}' % (_NAMES[type(event)].encode(), _encoder.encode(event))


def _with_limits(line: Setting | ArrivalRecord | RefusedPlanRecord) -> bytes:
    """Return a line that may have infinite limits."""
    return _encoder.encode(_with_words(msgspec.to_builtins(line, enc_hook=_encode_range, str_keys=True)))


def _arrived(event: RequestArrived, *, keeps_prompts: bool) -> ArrivalRecord:
    request = event.request
    prompt = request.prompt_token_ids
    return ArrivalRecord(
        event.time,
        request.request_id,
        len(request.prompt_token_ids),
        request.sampling_params,
        request.arrival_time,
        request.slo,
        request.user,
        list(prompt) if keeps_prompts and not isinstance(prompt, range) else None,
        request.priority,
        request.num_choices,
        request.num_prompt_logprobs,
        request.cache_salt,
        request.uses_cache,
        request.continues,
    )


def _arrival(line: ArrivalRecord) -> RequestArrived:
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
        continues=line.continues,
    )
    return RequestArrived(line.time, request)


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
_decoder = msgspec.json.Decoder(
    Setting | ArrivalRecord | PlanRecord | RefusedPlanRecord, dec_hook=_decode_range, strict=False
)  # lax: words may stand for numbers
_name_decoder = msgspec.json.Decoder(_Named)
_event_decoders: Mapping[str, msgspec.json.Decoder[Event]] = {
    name: msgspec.json.Decoder(kind) for kind, name in _NAMES.items()
}
