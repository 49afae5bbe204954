"""Grammars of several parts, such as JSON between tags, as xgrammar's structural tags."""

from collections.abc import Mapping

from loong.grammar.schema import UnsupportedSchemaError, supported

_PARTS = {"sequence": "elements", "or": "elements", "tags_with_separator": "tags"}  # where each has its parts
_CONTENT = frozenset({"tag", "repeat"})  # which have one


def with_supported_schemas(tag: Mapping[str, object], max_blanks: int) -> dict[str, object]:
    """Return a structural tag whose schemas are ready for a grammar.

    `max_blanks` bounds the blanks in a row between JSON tokens. Raises `UnsupportedSchemaError` for an
    unsupported schema or part.
    """
    return {**tag, "format": _format(tag.get("format"), max_blanks)}


def _format(part: object, max_blanks: int) -> dict[str, object]:
    if not isinstance(part, dict):
        raise UnsupportedSchemaError("the structural tag", "has a part that is not an object")
    match kind := part.get("type"):
        case "const_string":
            return {**part}
        case "json_schema":
            schema = supported(part.get("json_schema"))
            return {"type": kind, "json_schema": schema, "max_whitespace_cnt": max_blanks}
        case str() if kind in _CONTENT:
            return {**part, "content": _format(part.get("content"), max_blanks)}
        case str() if kind in _PARTS:
            name = _PARTS[kind]
            return {**part, name: [_format(item, max_blanks) for item in part.get(name, ())]}
        case _:
            raise UnsupportedSchemaError("the structural tag", f"has a part of the type {kind!r}")
