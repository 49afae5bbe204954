"""The base of all answers, and their description."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct, json

from loong.core.request import FinishReason as EndReason

Json: TypeAlias = dict[str, Any]

FinishReason = Literal["stop", "length", "abort"]
FINISH_REASONS: dict[EndReason, FinishReason] = {
    EndReason.STOP: "stop",
    EndReason.LENGTH: "length",
    EndReason.ABORT: "abort",
}
StopReason = Annotated[
    str | int | None, Meta(description="The stop string or token of the request that ended the answer.")
]


class Answer(Struct, forbid_unknown_fields=True):
    """A JSON object with these fields and no others. Only fields that are UNSET are left out."""


def described(types: Iterable[object], reference: str) -> tuple[list[Json], Json]:
    """Return a schema of each type, and by name those of all objects that they contain.

    `reference` is the template of a reference to an object.
    """
    schemas, components = json.schema_components(types, ref_template=reference)
    for component in components.values():
        fixed = [name for name, field in component.get("properties", {}).items() if "default" in field]
        for name in fixed:  # sent nevertheless
            del component["properties"][name]["default"]
        if fixed:
            component["required"] = [*component["required"], *fixed]
    return list(schemas), components
