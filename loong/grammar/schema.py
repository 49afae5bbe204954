"""Checks of JSON schemas. Only schemas that answers can follow exactly are supported; others are refused."""

from collections.abc import Mapping

from loong.core.errors import InvalidRequestError
from loong.grammar.disjoint import Disjointness, target_of
from loong.grammar.json_pattern import PatternError, json_pattern
from loong.grammar.pattern import num_repetitions

MAX_DEPTH = 64
MAX_SCHEMAS = 4096  # within one schema
MAX_REPETITIONS = 1000  # in all patterns of one schema: the cost of a step grows with them

_ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("discriminator", "$comment", "$schema", "$id", "$defs", "definitions"),
    }
)
_OF_TYPE: Mapping[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "boolean": frozenset(),
    "null": frozenset(),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "object": frozenset(
        {"properties", "required", "additionalProperties", "propertyNames", "minProperties", "maxProperties"}
    ),
}
_FORMATS = frozenset(  # checked by pattern: the 30th of February is a date
    {
        *("date", "time", "date-time", "duration", "email", "hostname"),
        *("ipv4", "ipv6", "uuid", "uri", "uri-reference"),
    }
)
_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_ATOM, _LABEL = r"[\w!#$%&'*+/=?^`{|}~-]+", "[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?"
_PATTERNS = {  # of formats for which xgrammar lets pass escapes that JSON lacks, or numbers that begin with 0
    "email": rf"^{_ATOM}(\.{_ATOM})*@{_LABEL}(\.{_LABEL})*$",
    "ipv4": rf"^({_BYTE}\.){{3}}{_BYTE}$",
}
_CHOICES = ("anyOf", "oneOf", "allOf")
_TYPES_OF_VALUES: tuple[tuple[type, frozenset[str]], ...] = (
    (bool, frozenset({"boolean"})),  # before int, its base class
    (int, frozenset({"integer", "number"})),
    (float, frozenset({"number"})),
    (str, frozenset({"string"})),
    (list, frozenset({"array"})),
    (dict, frozenset({"object"})),
    (type(None), frozenset({"null"})),
)


class UnsupportedSchemaError(InvalidRequestError):
    """A schema has a part that is not supported."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"the schema {why}, at {path}")


def supported(schema: object) -> object:
    """Return the schema for a grammar. Raises `UnsupportedSchemaError` for an unsupported part.

    An object that names properties has no others unless `additionalProperties` says so.
    """
    return _Walk(schema).whole()


class _Walk:
    def __init__(self, root: object) -> None:
        self._root, self._disjointness = root, Disjointness(root)
        self._num_schemas = 0
        self._num_repetitions = 0

    def whole(self) -> object:
        """Return the whole schema, with the definitions that `oneOf` needs."""
        found, added = self.schema(self._root, "#", 0), self._disjointness.added
        definitions = dict[str, object]()
        while missing := added.keys() - definitions.keys():
            for name in sorted(missing):
                definitions[name] = self.schema(added[name], f"#/$defs/{name}", 0)
        if not definitions or not isinstance(found, dict):
            return found
        return {**found, "$defs": {**found.get("$defs", {}), **definitions}}

    def schema(self, schema: object, path: str, depth: int) -> object:
        self._num_schemas += 1
        if depth > MAX_DEPTH or self._num_schemas > MAX_SCHEMAS:
            most = f"{MAX_DEPTH} levels or {MAX_SCHEMAS} schemas in one"
            raise UnsupportedSchemaError(path, f"is too large (at most {most} are allowed)")
        if schema is True:
            return {}
        if not isinstance(schema, dict):
            raise UnsupportedSchemaError(path, "has a part that is neither an object nor true")
        _check_keywords(schema, path)
        self._check_reference(schema.get("$ref"), path)
        self._count_repetitions(schema.get("pattern", ""), path)
        if isinstance(branches := schema.get("oneOf"), list):
            others = {name: value for name, value in schema.items() if name != "oneOf"}
            schema = {**others, "anyOf": self._exclusive(branches, path)}
        found = {name: self._keyword(name, value, path, depth) for name, value in _closed(schema).items()}
        if (form := found.get("format")) in _PATTERNS:
            del found["format"]
            found["pattern"] = json_pattern(_PATTERNS[str(form)])
        return found

    def _check_reference(self, reference: object, path: str) -> None:
        """Raise if a reference leads back to itself through references only, because no answer would fit."""
        seen: set[str] = set()
        while isinstance(reference, str):
            if reference in seen:
                raise UnsupportedSchemaError(path, "refers only to itself")
            seen.add(reference)
            target = target_of(self._root, reference)
            reference = target.get("$ref") if isinstance(target, dict) else None

    def _exclusive(self, branches: list[object], path: str) -> list[object]:
        """Return the branches of a `oneOf` for `anyOf`. Raise if a value may fit two of them."""
        found = self._disjointness.exclusive(branches)
        if isinstance(found, tuple):
            raise UnsupportedSchemaError(
                path, f"has the branches {found[0]} and {found[1]} of oneOf, and a value may fit both"
            )
        return found

    def _count_repetitions(self, pattern: object, path: str) -> None:
        if not isinstance(pattern, str):
            raise UnsupportedSchemaError(path, "has a pattern that is not a string")
        self._num_repetitions += num_repetitions(pattern) if pattern else 0
        if self._num_repetitions > MAX_REPETITIONS:
            what = f"repeats parts of its patterns {self._num_repetitions} times"
            raise UnsupportedSchemaError(path, f"{what}, but at most {MAX_REPETITIONS} are allowed")

    def _keyword(self, name: str, value: object, path: str, depth: int) -> object:
        path = f"{path}/{name}"
        if name in _CHOICES or name == "prefixItems":
            schemas = value if isinstance(value, list) else [value]
            return [self.schema(item, f"{path}/{i}", depth + 1) for i, item in enumerate(schemas)]
        if name in ("properties", "$defs", "definitions"):
            if not isinstance(value, dict):
                raise UnsupportedSchemaError(path, f"needs an object for {name}")
            return {key: self.schema(item, f"{path}/{key}", depth + 1) for key, item in value.items()}
        if name == "pattern":
            return _json_pattern(value, path)
        if name in ("items", "additionalProperties", "propertyNames") and value is not False:
            return self.schema(value, path, depth + 1)
        return value


def _json_pattern(pattern: object, path: str) -> str:
    try:
        return json_pattern(str(pattern))
    except PatternError as error:
        raise UnsupportedSchemaError(path, f"has a pattern with {error}, which is not supported") from error


def _closed(schema: Mapping[str, object]) -> dict[str, object]:
    is_open = not schema.get("properties") or "additionalProperties" in schema
    return {**schema} if is_open else {**schema, "additionalProperties": False}


def _check_keywords(schema: Mapping[str, object], path: str) -> None:
    """Raise unless each keyword has an effect in its place."""
    names = schema.keys() - _ANNOTATIONS
    if heads := sorted(names & {"$ref", "enum", "const", *_CHOICES}):
        head = heads[0]
        siblings = names - {head} - ({"type"} if head in ("enum", "const") else set())
        if siblings:
            raise UnsupportedSchemaError(path, f"has {min(siblings)} next to {head}, which is not supported")
        _check_head(head, schema, path)
        return
    types = _types(schema, path)
    for name in sorted(names - {"type"}):
        if not any(name in _OF_TYPE[kind] for kind in types):
            raise UnsupportedSchemaError(path, f"has {name}, which is not supported for {_named(types)}")
    _check_values(schema, path)


def _check_head(head: str, schema: Mapping[str, object], path: str) -> None:
    value = schema[head]
    if head == "$ref":
        if not (isinstance(value, str) and (value == "#" or value.startswith("#/"))):
            raise UnsupportedSchemaError(path, f"refers to {value!r}, which is not within it")
    elif head in _CHOICES:
        if not isinstance(value, list) or not value or (head == "allOf" and len(value) > 1):
            most = "one schema" if head == "allOf" else "a list of schemas"
            raise UnsupportedSchemaError(path, f"needs {most} for {head}")
    elif "type" in schema:
        types = set(_types(schema, path))
        values = value if head == "enum" and isinstance(value, list) else [value]
        if not all(types & _types_of(item) for item in values):
            raise UnsupportedSchemaError(path, f"has a value in {head} that is not of its type")


def _types(schema: Mapping[str, object], path: str) -> tuple[str, ...]:
    """Return the types of a schema, or else the type that its keywords imply."""
    named = schema.get("type")
    if named is None:
        return ("object",) if "properties" in schema else ()
    types = named if isinstance(named, list) else [named]
    for kind in types:
        if not isinstance(kind, str) or kind not in _OF_TYPE:
            raise UnsupportedSchemaError(path, f"names the type {kind!r}, which does not exist")
    return tuple(types)


def _types_of(value: object) -> frozenset[str]:
    return next(types for kind, types in _TYPES_OF_VALUES if isinstance(value, kind))


def _check_values(schema: Mapping[str, object], path: str) -> None:
    form = schema.get("format")
    if form is not None and form not in _FORMATS:
        raise UnsupportedSchemaError(path, f"has the format {form!r}, which is not supported")
    if len(schema.keys() & {"pattern", "format"}) + bool(schema.keys() & {"minLength", "maxLength"}) > 1:
        raise UnsupportedSchemaError(path, "has several of pattern, format and lengths for one string")
    required, properties = schema.get("required", []), schema.get("properties", {})
    if not isinstance(required, list) or not isinstance(properties, dict):
        raise UnsupportedSchemaError(path, "needs a list for required and an object for properties")
    if unknown := [name for name in required if name not in properties]:
        raise UnsupportedSchemaError(path, f"requires {unknown[0]!r}, which is none of its properties")


def _named(types: tuple[str, ...]) -> str:
    return f"the type {' or '.join(types)}" if types else "a schema without a type"
