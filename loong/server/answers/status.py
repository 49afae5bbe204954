"""Answers about the server, and those of `/tokenize` and `/detokenize`."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from loong.core.instance import InstanceKind
from loong.engine.cluster_size import InstanceState
from loong.engine.faults import FaultKind
from loong.engine.health import Trouble
from loong.server.answers.base import Answer


class Model(Answer, tag_field="object", tag="model"):
    """A model that is served."""

    id: str
    created: int
    owned_by: str
    max_model_len: Annotated[int, Meta(description="The longest prompt and answer together, in tokens.")]


class ModelList(Answer, tag_field="object", tag="list"):
    """The model that is served, once for each of its names."""

    data: list[Model]


class Tokenized(Answer):
    """Token ids of a text or a chat."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: Annotated[
        list[str] | None,
        Meta(description="The vocabulary's piece of each token, if the request wants them."),
    ]


class Detokenized(Answer):
    """The text of token ids."""

    prompt: str


class Status(Answer):
    """The outcome of a command."""

    status: str


class LoanStatus(Answer):
    """Room for KV that one engine lends another."""

    creditor: int
    debtor: int
    num_tokens: int
    seconds: Annotated[float, Meta(description="The time since it was agreed.")]
    reason: str


class EngineHealth(Answer):
    """The health of one of several engines."""

    status: Annotated[
        Literal["ok", "degraded", "dead", "starting", "restarting", "quarantined"],
        Meta(description="dead: it runs, but cannot serve. quarantined: it has failed, and stays away."),
    ]
    message: Annotated[str | UnsetType, Meta(description="What is wrong, in words.")] = UNSET
    instances: Annotated[
        dict[str, Trouble] | UnsetType, Meta(description="Its instances that do not serve, and why.")
    ] = UNSET
    loans: Annotated[
        list[LoanStatus] | UnsetType, Meta(description="The room that it lends, and that it has of others.")
    ] = UNSET


class HealthStatus(Answer):
    """The health of a server that serves. One that does not answers 503 with the reason."""

    status: Annotated[
        Literal["ok", "degraded"],
        Meta(description="degraded: some instances or engines do not serve, or none could start again."),
    ]
    message: Annotated[
        str | UnsetType,
        Meta(description="The instances that do not serve, and what else is wrong, in words."),
    ] = UNSET
    instances: Annotated[
        dict[str, Trouble] | UnsetType,
        Meta(description="The instances that do not serve, and why. draining: an operator removes it."),
    ] = UNSET
    engines: Annotated[
        dict[str, EngineHealth] | UnsetType,
        Meta(description="The health of each engine, if there are several; each numbers its instances."),
    ] = UNSET
    loans: Annotated[
        list[LoanStatus] | UnsetType,
        Meta(description="One of several engines alone: the room that it lends, and that it has of others."),
    ] = UNSET


class Version(Answer):
    """The version of loong."""

    version: str


class Load(Answer):
    """Requests in flight."""

    server_load: int


class Trace(Struct):
    """A trace in Chrome's format. Only its description: it is encoded where it is made."""

    traceEvents: list[dict[str, Any]]  # noqa: N815 - Chrome's name


class TraceFile(Answer):
    """The path of a trace on the server."""

    trace: str


class Instance(Answer):
    """An instance, and the tokens of KV that it holds and can hold."""

    id: int
    state: Annotated[
        InstanceState,
        Meta(
            description="draining: takes nothing new, and leaves once empty. lost: is started again. "
            "quarantined: is not."
        ),
    ]
    kv_used: int
    kv_capacity: int
    kind: Annotated[InstanceKind, Meta(description="attention: a memory instance, without weights.")]


class Instances(Answer):
    """The instances of a server."""

    num_instances: Annotated[
        int,
        Meta(description="The number that is asked for: that of `loong serve`, or of the last change."),
    ]
    max_instances: Annotated[int, Meta(description="The most that there can be.")]
    memory_instances: Annotated[int, Meta(description="The number of memory instances that is asked for.")]
    is_done: Annotated[bool, Meta(description="True if exactly these serve.")]
    instances: list[Instance]


class InjectedFault(Answer):
    """The fault, and the instance or the engine that has it."""

    fault: FaultKind
    engine: Annotated[int | UnsetType, Meta(description="Its engine, if there are several.")] = UNSET
    instance: Annotated[int | UnsetType, Meta(description="The instance, by its number in its engine.")] = (
        UNSET
    )


class Document(Struct):
    """An OpenAPI 3.1 document. Only its description."""

    openapi: str
