"""Answers queries as Prometheus would, of a server that was asked twice."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import promql_parser as ast
from prometheus_client.parser import text_string_to_metric_families

Labels: TypeAlias = frozenset[tuple[str, str]]
Vector: TypeAlias = dict[Labels, float]

_AGGREGATES: Mapping[str, Callable[[Sequence[float]], float]] = {
    "sum": sum,
    "min": min,
    "max": max,
    "avg": lambda values: sum(values) / len(values),
    "count": len,
}
_OPERATIONS: Mapping[str, Callable[[float, float], float]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b if b else math.nan,
}


@dataclass(frozen=True)
class Scrapes:
    """The text of `/metrics` at two times, `seconds` apart."""

    before: str
    after: str
    seconds: float

    def answer(self, query: str) -> Vector:
        """Return the values of a query at the later time, by their labels; a number has none."""
        return self._value(ast.parse(query))

    def _value(self, node: ast.Expr) -> Vector:
        match node:
            case ast.NumberLiteral():
                return {frozenset(): node.val}
            case ast.ParenExpr():
                return self._value(node.expr)
            case ast.VectorSelector():
                return _selected(self.after, node)
            case ast.Call(func=function, args=[ast.MatrixSelector() as window]):
                return self._growth(window.vector_selector, per_second=function.name in ("rate", "irate"))
            case ast.Call(func=function, args=[share, buckets]) if function.name == "histogram_quantile":
                (quantile,) = self._value(share).values()
                return _quantile(quantile, self._value(buckets))
            case ast.AggregateExpr():
                return _aggregated(node, self._value(node.expr))
            case ast.BinaryExpr():
                return _combined(str(node.op), self._value(node.lhs), self._value(node.rhs))
        raise ValueError(f"{type(node).__name__} is not answered here")

    def _growth(self, selector: ast.VectorSelector, *, per_second: bool) -> Vector:
        before, after = _selected(self.before, selector), _selected(self.after, selector)
        seconds = self.seconds if per_second else 1.0
        return {labels: (after[labels] - before[labels]) / seconds for labels in after.keys() & before.keys()}


def _selected(text: str, selector: ast.VectorSelector) -> Vector:
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {
        frozenset(sample.labels.items()): sample.value
        for sample in samples
        if sample.name == selector.name
        and all(_matches(matcher, sample.labels) for matcher in selector.matchers.matchers)
    }


def _matches(matcher: ast.Matcher, labels: Mapping[str, str]) -> bool:
    value = labels.get(matcher.name, "")
    if matcher.op in (ast.MatchOp.Equal, ast.MatchOp.NotEqual):
        is_it: bool = value == matcher.value
    else:
        is_it = re.fullmatch(matcher.value, value) is not None
    return is_it is (matcher.op in (ast.MatchOp.Equal, ast.MatchOp.Re))


def _aggregated(node: ast.AggregateExpr, vector: Vector) -> Vector:
    groups: defaultdict[Labels, list[float]] = defaultdict(list)
    for labels, value in vector.items():
        groups[_kept(labels, node.modifier)].append(value)
    return {labels: _AGGREGATES[str(node.op)](values) for labels, values in groups.items()}


def _kept(labels: Labels, modifier: ast.AggModifier | None) -> Labels:
    if modifier is None:
        return frozenset()
    is_by = modifier.type == ast.AggModifierType.By
    return frozenset(label for label in labels if (label[0] in modifier.labels) == is_by)


def _combined(operation: str, left: Vector, right: Vector) -> Vector:
    """Return values of the same labels together; a number goes with all."""
    combine = _OPERATIONS[operation]
    if right.keys() == {frozenset()}:
        return {labels: combine(value, right[frozenset()]) for labels, value in left.items()}
    if left.keys() == {frozenset()}:
        return {labels: combine(left[frozenset()], value) for labels, value in right.items()}
    return {labels: combine(left[labels], right[labels]) for labels in left.keys() & right.keys()}


def _quantile(share: float, buckets: Vector) -> Vector:
    """As Prometheus estimates it: within its bucket a value may be anywhere."""
    groups: defaultdict[Labels, list[tuple[float, float]]] = defaultdict(list)
    for labels, count in buckets.items():
        named = dict(labels)
        bound = float(named.pop("le"))
        groups[frozenset(named.items())].append((bound, count))
    return {labels: _estimate(share, sorted(counts)) for labels, counts in groups.items()}


def _estimate(share: float, counts: Iterable[tuple[float, float]]) -> float:
    counts = list(counts)
    wanted = share * counts[-1][1]
    if not wanted:
        return math.nan
    below, had = 0.0, 0.0
    for bound, count in counts:
        if count >= wanted:
            return below if math.isinf(bound) else below + (bound - below) * (wanted - had) / (count - had)
        below, had = bound, count
    return math.nan
