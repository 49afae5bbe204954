"""The places of a JSON body, as an OpenAPI document describes it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

Json: TypeAlias = Mapping[str, Any]
FREE_NAME = "5"  # where any name will do; in a logit bias it is a token id


@dataclass(frozen=True)
class Place:
    """A place in a body, by names of fields and 0 for the item of a list, and a schema of its value."""

    path: tuple[str | int, ...]
    schema: Json

    @property
    def is_number(self) -> bool:
        """Return whether a number may stand there."""
        return self.schema.get("type") in ("integer", "number")

    @property
    def is_bounded(self) -> bool:
        """Return whether the schema leaves no number, and no unknown value, without bounds."""
        if self.is_number:
            return {"minimum", "maximum"} <= self.schema.keys()
        is_closed = (
            self.schema.get("type") != "object" or self.schema.get("additionalProperties", True) is not True
        )
        is_list_of_something = self.schema.get("type") != "array" or "items" in self.schema
        return is_closed and is_list_of_something and bool(self.schema.keys() & {"type", "enum", "const"})


def bodies(document: Json) -> Mapping[str, Json]:
    """Return the schema of each body that a document describes, by its address."""
    return {
        path: operation["requestBody"]["content"]["application/json"]["schema"]
        for path, operations in document["paths"].items()
        for operation in operations.values()
        if "requestBody" in operation
    }


def resolved(schema: Json, document: Json) -> Json:
    """Return the schema that another refers to, or itself."""
    if "$ref" not in schema:
        return schema
    found: Json = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[-1]]
    return found


def places(
    schema: Json, document: Json, path: tuple[str | int, ...] = (), within: tuple[str, ...] = ()
) -> Iterator[Place]:
    """Yield every place within a body, once for each schema that it may have; recursion ends at once."""
    reference = schema.get("$ref", "")
    if reference in within:
        return
    within += (reference,) if reference else ()
    found = resolved(schema, document)
    options = found.get("anyOf", found.get("oneOf"))
    if options is not None:
        for option in options:
            yield from places(option, document, path, within)
        return
    yield Place(path, found)
    if isinstance(items := found.get("items"), dict):
        yield from places(items, document, (*path, 0), within)
    if isinstance(values := found.get("additionalProperties"), dict):
        yield from places(values, document, (*path, FREE_NAME), within)
    for name, field in found.get("properties", {}).items():
        yield from places(field, document, (*path, name), within)
