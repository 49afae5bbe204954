"""Flags for fields of a configuration: a table says how to parse each, and the configuration its default."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, NamedTuple


class FieldFlag(NamedTuple):
    """The flag for a field, whose help ends with the default, perhaps in other words.

    `unit` stands for the value in the help (None: the field's name).
    """

    field: str
    parse: Callable[[str], object]
    unit: str | None
    text: str
    default: str = "%(default)s"


def add_field_flags(group: argparse._ActionsContainer, config: type[Any], table: Sequence[FieldFlag]) -> None:
    """Add the flags of a table, each with the default that the dataclass `config` has."""
    defaults = {field.name: field.default for field in fields(config)}
    for field, parse, unit, text, default in table:
        group.add_argument(
            f"--{field.replace('_', '-')}",
            type=parse,
            default=defaults[field],
            metavar=unit,
            help=f"{text} ({default})",
        )


def field_values(args: argparse.Namespace, table: Sequence[FieldFlag]) -> dict[str, Any]:
    """Return the values of the flags of a table by the names of their fields."""
    return {flag.field: getattr(args, flag.field) for flag in table}
