"""The base of all request schemas, and the bounds of their numbers."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from loong.core.limits import LIMITS


def within(name: str, least: int | None = None) -> FieldInfo:
    """Return the bounds of a field, equal to those that the engine checks."""
    low, high = LIMITS[name]
    bounds: FieldInfo = Field(ge=low if least is None else least, le=high)
    return bounds


def as_integer(value: object) -> object:
    """Return a whole number of 64 bits as an integer, and any other value unchanged."""
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**63
    return int(value) if is_whole else value  # type: ignore[call-overload]  # a float


def as_integers(values: Any) -> Any:  # Any: JSON
    """Return a list with its whole numbers as integers, and any other value unchanged."""
    if isinstance(values, list) and float in set(map(type, values)):
        return list(map(as_integer, values))
    return values


class Schema(BaseModel):
    """A JSON object in which each field has its type, and no other field is allowed."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _as_meant(cls, content: object) -> object:
        """Drop fields that are null: clients send back messages with all possible fields.

        Whole numbers become integers: 2.0 and 2 are one number in JSON.
        """
        if isinstance(content, dict):
            return {name: as_integer(value) for name, value in content.items() if value is not None}
        return content
