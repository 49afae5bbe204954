"""`loong models`: flags and output."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from loong.launcher.models.listing import Listing

_EXAMPLES = """\
examples:
  loong models
  loong models --json
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command `models`."""
    parser = subparsers.add_parser(
        "models",
        help="list models that are built in, on this disk or supported",
        description="List models that are built in or on this disk, and the families that can be served.",
        epilog=_EXAMPLES,
    )
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")


def run(args: argparse.Namespace) -> int:
    """Print the lists and return 0."""
    from loong.launcher.models.listing import list_models  # takes a moment, which `--help` can do without

    found = list_models()
    print(msgspec.json.encode(found).decode() if args.json else _reported(found))
    return 0


def _reported(found: "Listing") -> str:
    built_in = [
        (model.name, _here(model.disk_bytes, model.fetch_bytes), model.description)
        for model in found.built_in
    ]
    cached = [(model.name, _here(model.disk_bytes, None), model.description) for model in found.cached]
    shapes = [(shape.name, _size(shape.num_bytes), shape.description) for shape in found.shapes]
    types = ", ".join(found.gguf_types) or "none, since the package gguf is not installed"
    return f"""\
Built in: loong serve NAME
{_columns(built_in)}

Of the Hugging Face hub, on this disk: loong serve ORG/NAME, for others as well
{_columns(cached or [("none", "", "")])}

Sizes of well-known models without weights: loong serve NAME --load-format dummy
{_columns(shapes)}

Folders with safetensors: {", ".join(found.architectures)}
GGUF files: of the architectures {", ".join(found.gguf_architectures)}; tensors of the types {types}"""


def _columns(rows: Sequence[tuple[str, str, str]]) -> str:
    names, sizes = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"  {name:{names}}  {size:>{sizes}}  {words}".rstrip() for name, size, words in rows)


def _here(disk_bytes: int | None, fetch_bytes: int | None) -> str:
    if disk_bytes is not None:
        return _size(disk_bytes)
    return "" if fetch_bytes is None else f"{_size(fetch_bytes)} to fetch"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"
