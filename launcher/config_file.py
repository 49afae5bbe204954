"""`--config FILE.yaml`: flags of a command, with the command line over the file over defaults."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from loong.core.errors import ConfigError
from loong.core.similar_words import meant
from loong.foreign_json import NOT_JSON
from loong.launcher.parser import CommandParser

FLAG = "--config"


def add_config_flag(parser: CommandParser) -> None:
    """Add `--config FILE` to a command."""
    parser.add_argument(
        FLAG,
        type=Path,
        metavar="FILE",
        help="YAML file with names of flags as keys; flags that are typed take precedence",
    )


def apply_config_file(parser: CommandParser, arguments: Sequence[str]) -> None:
    """Use the values of the file that `arguments` name, if any, as the defaults of a command.

    Raises `ConfigError`, which names the file and the unknown key or wrong value.
    """
    path = _named(arguments)
    if path is None:
        return
    set_values(parser, _read(path), str(path), arguments)


def set_values(
    parser: CommandParser, values: Mapping[str, object], source: str, typed: Sequence[str] = ()
) -> None:
    """Use values by the names of flags as the defaults of a command, unless they are `typed`.

    Raises `ConfigError`, which names the source and the unknown key or wrong value.
    """
    by_name = {_name(action): action for action in parser.actions if action.dest not in ("help", "config")}
    for key, value in values.items():
        name = key.replace("_", "-")
        if name not in by_name:
            if _is_taken_silently(parser, name, value):
                continue
            place = None if parser.elsewhere is None else parser.elsewhere(f"--{name}")
            raise ConfigError(f"{source}: there is no flag {key!r}{place or meant(name, by_name)}")
        action = by_name[name]
        if isinstance(action.default, list) and any(_is_flag_of(action, word) for word in typed):
            continue  # a flag that collects values would add to the source's
        parser.set_defaults(**{action.dest: _parsed(source, parser, action, value)})


def _is_taken_silently(parser: CommandParser, name: str, value: object) -> bool:
    """Return whether a key asks for what is so in any case, as `enable-chunked-prefill: true`."""
    flag = {True: f"--{name}", False: f"--no-{name}"}.get(value) if isinstance(value, bool) else None
    return flag in parser.taken_silently


def _named(arguments: Sequence[str]) -> Path | None:
    found = None
    for word, following in zip(arguments, [*arguments[1:], None], strict=True):
        if word == FLAG and following is not None:
            found = Path(following)
        elif word.startswith(f"{FLAG}="):
            found = Path(word.partition("=")[2])
    return found


def _read(path: Path) -> Mapping[str, object]:
    try:
        return msgspec.yaml.decode(path.read_bytes(), type=dict[str, object])
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from None
    except NOT_JSON as error:
        why = " ".join(str(error).split())
        raise ConfigError(f"--config {path} is no YAML of flags and values: {why}") from None


def _parsed(source: str, parser: CommandParser, action: argparse.Action, value: object) -> object:
    """Return the value as the flag parses it."""
    if value is None:
        raise ConfigError(f"{source}: {_name(action)} has no value")
    try:
        return parser.value_of(action, list(_typed(action, value)))
    except argparse.ArgumentError as error:
        raise ConfigError(f"{source}: {_name(action)}: {error.message}") from None


def _typed(action: argparse.Action, value: object) -> Iterator[str]:
    """Yield the words that give this value on the command line."""
    values = [str(one) for one in value] if isinstance(value, list) else [str(value)]
    if not action.option_strings:
        yield ",".join(values)
    elif isinstance(value, bool) and action.nargs == 0:
        if value:
            yield action.option_strings[0]
        elif isinstance(action, argparse.BooleanOptionalAction):
            yield action.option_strings[-1]
    elif action.nargs in ("+", "*"):
        yield from (_long(action), *values)
    elif isinstance(action.default, list):
        for one in values:
            yield f"{_long(action)}={one}"
    else:
        yield f"{_long(action)}={','.join(values)}"


def _is_flag_of(action: argparse.Action, word: str) -> bool:
    return word.partition("=")[0] in action.option_strings


def _long(action: argparse.Action) -> str:
    return next(flag for flag in action.option_strings if flag.startswith("--"))


def _name(action: argparse.Action) -> str:
    return _long(action).removeprefix("--") if action.option_strings else action.dest
