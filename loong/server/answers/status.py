"""Answers about the server, and those of `/tokenize` and `/detokenize`."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

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


class HealthStatus(Answer):
    """The health of a server that serves. One that does not answers 503 with the reason."""

    status: Annotated[
        Literal["ok", "degraded"],
        Meta(description="degraded: some instances do not serve, or none could start again."),
    ]
    message: Annotated[
        str | UnsetType,
        Meta(description="The instances that do not serve, and what else is wrong, in words."),
    ] = UNSET
    instances: Annotated[
        dict[str, Trouble] | UnsetType,
        Meta(description="The instances that do not serve, and why. draining: an operator removes it."),
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


class Instances(Answer):
    """The instances of a server."""

    num_instances: Annotated[
        int,
        Meta(description="The number that is asked for: that of `loong serve`, or of the last change."),
    ]
    max_instances: Annotated[int, Meta(description="The most that there can be.")]
    is_done: Annotated[bool, Meta(description="True if exactly these serve.")]
    instances: list[Instance]


class InjectedFault(Answer):
    """The fault, and the instance that has it."""

    fault: FaultKind
    instance: int


class Document(Struct):
    """An OpenAPI 3.1 document. Only its description."""

    openapi: str
