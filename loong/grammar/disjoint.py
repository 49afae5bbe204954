"""Proofs that no value fits two schemas, so that `oneOf` of them is the same as `anyOf`."""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, count, product

_ALL_TYPES = frozenset({"string", "number", "boolean", "null", "array", "object"})
_MAX_REFERENCES = 16  # in a row
_MAX_DEPTH = 8  # of properties and choices that a proof looks into
_MAX_STEPS = 2**15  # of all proofs; without more, two schemas count as not different
_ADDED = "loong-required-"  # begins the names of definitions
_Schema = Mapping[str, object]


class Disjointness:
    """Finds proofs for schemas within one schema, whose references lead into it."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._num_steps = 0
        self._names: dict[str, str] = {}  # of added definitions
        self.added: dict[str, _Schema] = {}
        """Definitions that branches refer to, by name, to be added to those of the root."""

    def exclusive(self, branches: Sequence[object]) -> list[object] | tuple[int, int]:
        """Return the branches of a `oneOf`, of which at most one fits any value.

        A property with different values in two branches is required in both. Returns two branches by their
        indices instead, if nothing proves that they differ.
        """
        required: dict[int, set[str]] = {index: set() for index in range(len(branches))}
        for (i, one), (j, other) in combinations(enumerate(branches), 2):
            tags = self._tags(one, other, 0)
            if tags is None:
                return i, j
            required[i] |= tags
            required[j] |= tags
        return [self._requiring(branch, required[index]) for index, branch in enumerate(branches)]

    def _tags(self, one: object, other: object, depth: int) -> set[str] | None:
        """Return the properties that both need to have, so that no value fits both; None if none suffice."""
        self._num_steps += 1
        one, other = self._resolved(one), self._resolved(other)
        if not isinstance(one, Mapping) or not isinstance(other, Mapping):
            return None
        if depth > _MAX_DEPTH or self._num_steps > _MAX_STEPS:
            return None
        if _is_choice(one) or _is_choice(other):
            pairs = product(_choices(one), _choices(other))
            return set() if all(self._tags(*pair, depth + 1) == set() for pair in pairs) else None
        values, others = _values(one), _values(other)
        if values is not None and others is not None:
            self._num_steps += len(values) + len(others)
            return None if {*map(_key, values)} & {*map(_key, others)} else set()
        if (common := _types(one) & _types(other)) != {"object"}:
            return None if common else set()
        return self._different_property(one, other, depth)

    def _different_property(self, one: _Schema, other: _Schema, depth: int) -> set[str] | None:
        """Return a property whose values differ, or nothing if both have such a one anyway."""
        if _requires_what_is_forbidden(one, other) or _requires_what_is_forbidden(other, one):
            return set()
        properties, others = _properties(one), _properties(other)
        required = _required(one) & _required(other)
        for name in sorted(properties.keys() & others.keys(), key=lambda name: (name not in required, name)):
            if self._tags(properties[name], others[name], depth + 1) == set():
                return set() if name in required else {name}
        return None

    def _requiring(self, branch: object, names: Iterable[str]) -> object:
        found = self._resolved(branch)
        if not isinstance(found, Mapping) or not (missing := {*names} - _required(found)):
            return branch
        required: _Schema = {**found, "required": sorted(_required(found) | missing)}
        if found is branch:
            return required
        key = json.dumps([branch, *sorted(missing)])  # a definition, since it may lead back to this place
        if key not in self._names:
            numbers = (f"{_ADDED}{number}" for number in count(len(self._names)))
            name = next(name for name in numbers if target_of(self._root, f"#/$defs/{name}") is None)
            self._names[key], self.added[name] = name, required
        return {"$ref": f"#/$defs/{self._names[key]}"}

    def _resolved(self, schema: object) -> object:
        """Return the schema that a reference leads to."""
        for _ in range(_MAX_REFERENCES):
            if not isinstance(schema, Mapping):
                break
            if isinstance(reference := schema.get("$ref"), str):
                schema = target_of(self._root, reference)
            elif isinstance(parts := schema.get("allOf"), list) and len(parts) == 1:
                schema = parts[0]
            else:
                break
        return schema


def target_of(root: object, reference: str) -> object:
    """Return the target of a reference inside a schema, or None."""
    found = root
    for part in reference.removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _is_choice(schema: _Schema) -> bool:
    return "anyOf" in schema or "oneOf" in schema


def _choices(schema: _Schema) -> Sequence[object]:
    found = schema.get("anyOf", schema.get("oneOf", [schema]))
    return found if isinstance(found, list) else [None]


def _values(schema: _Schema) -> Sequence[object] | None:
    """Return the only values that fit a schema, or None."""
    if "const" in schema:
        return [schema["const"]]
    found = schema.get("enum")
    return found if isinstance(found, list) else None


def _types(schema: _Schema) -> frozenset[str]:
    """Return the types of values that fit a schema. Integers are numbers."""
    if (values := _values(schema)) is not None:
        return frozenset(map(_type_of, values))
    named = schema.get("type")
    if named is None:
        return frozenset({"object"}) if "properties" in schema else _ALL_TYPES
    names = named if isinstance(named, list) else [named]
    return frozenset("number" if name == "integer" else str(name) for name in names)


def _type_of(value: object) -> str:
    match value:
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case None:
            return "null"
        case _:
            return "object"


def _key(value: object) -> tuple[str, object]:
    """Return what equal values share. 1 and 1.0 are equal, 1 and true are not."""
    kind = _type_of(value)
    return kind, json.dumps(value, sort_keys=True) if kind in ("array", "object") else value


def _properties(schema: _Schema) -> Mapping[str, object]:
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def _required(schema: _Schema) -> set[str]:
    found = schema.get("required")
    return set(map(str, found)) if isinstance(found, list) else set()


def _requires_what_is_forbidden(one: _Schema, other: _Schema) -> bool:
    """Return whether the first requires a property that the second forbids."""
    is_closed = other.get("additionalProperties") is False
    return is_closed and not _required(one) <= _properties(other).keys()
