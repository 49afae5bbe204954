"""The base of all request schemas, and the bounds of their numbers."""

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from loong.core.request import LIMITS


def within(name: str, least: int | None = None) -> FieldInfo:
    """Return the bounds of a field, equal to those that the engine checks."""
    low, high = LIMITS[name]
    bounds: FieldInfo = Field(ge=low if least is None else least, le=high)
    return bounds


class Schema(BaseModel):
    """A JSON object in which each field has its type, and no other field is allowed."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nulls(cls, content: object) -> object:
        """Drop fields that are null: clients send back messages with all possible fields."""
        if isinstance(content, dict):
            return {name: value for name, value in content.items() if value is not None}
        return content
