"""JSON objects of any form, such as JSON schemas, with bounded numbers."""

from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, WithJsonSchema

from loong.core.limits import number_text

VALUE_NAME = "JsonValue"
_VALUE = {"$ref": f"#/components/schemas/{VALUE_NAME}"}
_OBJECT = {"type": "object", "additionalProperties": _VALUE}
_INTEGERS = (-(2**63), 2**64 - 1)  # what JSON and msgpack encoders write
_NUMBERS = (-1.7976931348623157e308, 1.7976931348623157e308)  # what a float64 holds

VALUE_SCHEMA: Mapping[str, object] = {
    "description": "Any JSON of numbers within these bounds.",
    "anyOf": [
        {"type": "null"},
        {"type": "boolean"},
        {"type": "integer", "minimum": _INTEGERS[0], "maximum": _INTEGERS[1]},
        {"type": "number", "minimum": _NUMBERS[0], "maximum": _NUMBERS[1]},
        {"type": "string"},
        {"type": "array", "items": _VALUE},
        _OBJECT,
    ],
}


def _check_numbers(value: Any) -> Any:  # Any: JSON
    """Return a value of JSON unchanged. Raises ValueError if it has a number out of bounds."""
    match value:
        case dict():
            for item in value.values():
                _check_numbers(item)
        case list():
            for item in value:
                _check_numbers(item)
        case int() | float():
            low, high = _INTEGERS if isinstance(value, int) else _NUMBERS
            if not low <= value <= high:
                limits = f"{number_text(low)} to {number_text(high)}"
                raise ValueError(f"numbers within must be from {limits}, but one is {number_text(value)}")
    return value


FreeObject: TypeAlias = Annotated[dict[str, Any], AfterValidator(_check_numbers), WithJsonSchema(_OBJECT)]
