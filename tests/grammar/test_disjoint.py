"""`oneOf` is taken where at most one branch fits any value, and refused elsewhere."""

import json
from typing import Annotated, Any, Literal

import jsonschema_rs
import pytest
from grammar_walks import of_schema, random_output
from pydantic import BaseModel, Field

from loong.grammar.schema import UnsupportedSchemaError, supported

pytest.importorskip("xgrammar")


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog", "puppy"] = "dog"
    lives: int


class Fish(BaseModel):
    kind: Literal["fish"] = "fish"
    friends: "list[Pet]" = []


Pet = Annotated[Cat | Dog | Fish, Field(discriminator="kind")]


class House(BaseModel):
    pet: Pet
    owner: Annotated[str | None, Field(max_length=3)]


def tagged(value: object, **others: object) -> dict[str, object]:
    return {"type": "object", "properties": {"k": {"const": value}, **others}, "required": ["k"]}


DISJOINT: tuple[dict[str, Any], ...] = (
    House.model_json_schema(),
    {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "integer"}, {"type": "null"}]},
    {"oneOf": [{"const": 1}, {"const": True}, {"enum": ["1", None]}, {"enum": [[1], {"a": 1}]}]},
    {"oneOf": [{"enum": ["a", "b"]}, {"type": ["integer", "boolean"]}]},
    {"oneOf": [tagged("a"), tagged("b"), {"type": "array", "items": {"type": "boolean"}}]},
    {"oneOf": [tagged(1, a={"type": "null"}), tagged("1", a={"type": "null"})]},
    {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": tagged("a"), "b": tagged("b")}},
    {"oneOf": [{"anyOf": [{"type": "null"}, {"const": "x"}]}, {"type": "boolean"}]},
    {"oneOf": [{"properties": {"k": {"const": 1}}}, {"properties": {"k": {"const": 2}}}]},
    {
        "oneOf": [
            {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"type": "null"}}, "additionalProperties": False},
        ]
    },
    {"oneOf": [tagged({"deep": 1}), tagged({"deep": 2})]},
    {"oneOf": [{"type": "object", "properties": {"n": tagged(1)}, "required": ["n"]}, {"type": "string"}]},
    {"oneOf": [{"type": "integer"}]},
)


@pytest.mark.parametrize("schema", DISJOINT)
def test_any_answer_fits_one_branch(schema: dict[str, Any]) -> None:
    for seed in range(4):
        found = json.loads(random_output(of_schema(schema), seed))
        jsonschema_rs.validate(schema, found)


OVERLAPPING: tuple[dict[str, Any], ...] = (
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"oneOf": [{"type": "null"}, {"type": "string"}, {"const": "a"}]},
    {"oneOf": [{"const": 1}, {"const": 1.0}]},
    {"oneOf": [{"enum": [1, 2]}, {"enum": [2, 3]}]},
    {"oneOf": [tagged("a"), tagged("a")]},
    {"oneOf": [{"type": "object", "properties": {"a": {}}}, {"type": "object", "properties": {"b": {}}}]},
    {"oneOf": [{}, {"type": "string"}]},
    {"oneOf": [{"$ref": "#"}, {"type": "string"}]},
    {"oneOf": [{"type": ["string", "null"]}, {"anyOf": [{"type": "null"}, {"type": "integer"}]}]},
    {"oneOf": [{"type": "array", "items": {"const": 1}}, {"type": "array", "items": {"const": 2}}]},
)


@pytest.mark.parametrize("schema", OVERLAPPING)
def test_branches_that_a_value_may_fit_both_are_named(schema: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedSchemaError, match=r"the branches \d and \d of oneOf.* at #$"):
        supported(schema)


def test_a_proof_takes_a_bounded_time() -> None:
    deep: dict[str, Any] = {"type": "null"}
    for _ in range(20):
        deep = {"anyOf": [deep, deep]}
    with pytest.raises(UnsupportedSchemaError):
        supported({"oneOf": [deep, {"anyOf": [deep, {"type": "string"}]}]})
    many = [{"enum": [f"{number}-{i}" for i in range(20)]} for number in range(200)]
    with pytest.raises(UnsupportedSchemaError):
        supported({"oneOf": many})
    supported({"oneOf": [tagged(number) for number in range(100)]})
