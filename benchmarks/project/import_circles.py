"""Circles of imports among modules or folders.

Imports inside functions count, those for types alone do not.
"""

import ast
from collections.abc import Iterator, Mapping, Set
from graphlib import CycleError, TopologicalSorter

Graph = Mapping[str, Set[str]]


def module_graph(trees: Mapping[str, ast.Module]) -> Graph:
    """Return the modules that each module imports, by dotted names."""
    return {
        name: {found for target in _imports(tree) if (found := _module(target, trees)) not in (None, name)}
        for name, tree in trees.items()
    }


def folder_graph(modules: Graph, packages: Set[str]) -> Graph:
    """Return the folders that each folder imports from, without folders that contain it or lie in it."""
    found: dict[str, set[str]] = {}
    for module, targets in modules.items():
        own = _folder(module, packages)
        others = {_folder(target, packages) for target in targets}
        kept = {other for other in others if not _is_inside(own, other) and not _is_inside(other, own)}
        found.setdefault(own, set()).update(kept)
    return found


def circles(graph: Graph) -> list[list[str]]:
    """Return the sets of nodes of which each leads to all others, without those of a single node."""
    found = []
    left = {node: set(targets) for node, targets in graph.items()}
    while True:
        try:
            TopologicalSorter(left).prepare()
        except CycleError as error:
            start = error.args[1][0]
            circle = _reached(left, start) & _reached(_reversed(left), start)
            found.append(sorted(circle))
            left = {node: targets - circle for node, targets in left.items() if node not in circle}
        else:
            return found


def _reached(graph: Graph, start: str) -> set[str]:
    reached, ahead = {start}, [start]
    while ahead:
        new = graph.get(ahead.pop(), set()) - reached
        reached |= new
        ahead += new
    return reached


def _reversed(graph: Graph) -> Graph:
    found: dict[str, set[str]] = {}
    for node, targets in graph.items():
        for target in targets:
            found.setdefault(target, set()).add(node)
    return found


def _imports(tree: ast.Module) -> Iterator[str]:
    """Yield all that a module imports, as dotted names that may end in the name of a value."""
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for part in node.body
        for inner in ast.walk(part)
    }
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def _module(target: str, trees: Mapping[str, ast.Module]) -> str | None:
    """Return the module that a dotted name is of, or None for a module of others."""
    while target and target not in trees:
        target = target.rpartition(".")[0]
    return target or None


def _folder(module: str, packages: Set[str]) -> str:
    return module if module in packages else module.rpartition(".")[0]


def _is_inside(one: str, other: str) -> bool:
    return f"{one}.".startswith(f"{other}.")
