"""Fields that hold an answer to a grammar: the OpenAI API's `response_format`."""

from typing import Annotated, Literal, Self

import msgspec
from pydantic import Field, model_validator

from loong.server.free_json import FreeObject
from loong.server.schema_base import Schema


class JsonSchemaFormat(Schema):
    """A JSON schema, and what to call it."""

    name: Annotated[str, Field(max_length=256)] = ""
    description: str | None = None
    schema_: Annotated[FreeObject, Field(alias="schema")]
    """What cannot be kept to is refused by name. An object that names properties has no others unless
    `additionalProperties` says so. Formats are kept to in shape."""
    strict: bool | None = None
    """Answers are held to the schema in any case."""


class ResponseFormat(Schema):
    """What an answer is held to: nothing, to be a JSON object, or a JSON schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _names_a_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with the type json_schema, and with no other")
        return self

    @property
    def schema_text(self) -> str | None:
        """The JSON schema that the answer is held to, as text; None for none."""
        if self.json_schema is not None:
            return msgspec.json.encode(self.json_schema.schema_).decode()
        return '{"type":"object"}' if self.type == "json_object" else None
