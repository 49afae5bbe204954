"""Classes that keep batches in flight: those with a collection that they change by the id of a batch."""

import ast
from collections.abc import Iterator

_CHANGES = ("pop", "setdefault", "add", "discard")


def kept_by_batch(cls: ast.ClassDef) -> set[str]:
    """Return the attributes of a class that it changes by the id of a batch."""
    return {name for node in ast.walk(cls) for name, key in _changes(node) if _is_batch_id(key)}


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield the attributes of `self` that a statement or a call changes at a key, with the key."""
    targets: list[ast.expr]
    match node:
        case ast.Assign(targets=targets) | ast.Delete(targets=targets):
            pass
        case ast.AugAssign(target=changed):
            targets = [changed]
        case ast.Call(func=ast.Attribute(value=kept, attr=name), args=[key, *_]) if name in _CHANGES:
            targets = [ast.Subscript(kept, key)]
        case _:
            return
    for target in targets:
        match target:
            case ast.Subscript(value=ast.Attribute(value=ast.Name(id="self"), attr=name), slice=key):
                yield name, key


def _is_batch_id(key: ast.expr) -> bool:
    match key:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.endswith("batch_id")
        case _:
            return False
