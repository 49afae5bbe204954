"""The Jinja of chat templates: the sandbox and the names that Hugging Face gives to them.

Nothing here is bounded in time or memory, so templates are compiled and rendered in a process of their own.
"""

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Never

from jinja2 import Template, TemplateError
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class _Generation(Extension):
    """The block `generation`, which marks what assistants write for a training, and adds nothing to it."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> Node:
        """Return what is inside a block."""
        line = next(parser.stream).lineno
        return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(Namespace):
    """A namespace without names that Python calls by itself, outside of the sandbox."""

    def __init__(*args: object, **names: object) -> None:
        self, *others = args
        assert isinstance(self, _Namespace)
        Namespace.__init__(self)
        given: dict[str, object] = dict(*others, **names)
        for name, value in given.items():
            self[name] = value

    def __setitem__(self, name: str, value: object) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace may have no name that begins with _, as in {name}")
        super().__setitem__(name, value)


def environment() -> ImmutableSandboxedEnvironment:
    """Return the environment that compiles and renders templates."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = _to_json
    made.globals |= {"raise_exception": _refuse, "strftime_now": _strftime_now, "namespace": _Namespace}
    return made


@lru_cache(maxsize=8)  # of one model there are two
def compiled(source: str) -> Template:
    """Return a template. A hostile one may raise anything, here and later."""
    return environment().from_string(source)


def rendered(source: str, names: Mapping[str, object]) -> Iterator[str]:
    """Yield the pieces of a template's text."""
    yield from compiled(source).generate(names)


def _refuse(message: object) -> Never:
    raise TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON, with the parameters of the filter in transformers."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
