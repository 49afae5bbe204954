"""The parts of an answer that may call tools."""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class CallStart:
    """The beginning of the call number `index` of an answer, from 0."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the arguments of a call, in the model's JSON."""

    index: int
    text: str


Part: TypeAlias = str | CallStart | CallArguments  # a string is content
