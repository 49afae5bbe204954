"""Keys of clients and operators: from the environment, from files, or typed.

Every user of a host can read what was typed, in the list of processes.
"""

import argparse
import logging
import os
import stat
from pathlib import Path

from loong.core.errors import ConfigError

logger = logging.getLogger(__name__)

API_KEY_VARIABLE = "LOONG_API_KEY"
CLIENT_VARIABLES = (API_KEY_VARIABLE, "OPENAI_API_KEY")  # the first that is set
ADMIN_KEY_VARIABLE = "LOONG_ADMIN_API_KEY"
_MAX_FILE_BYTES = 1 << 20


def add_server_key_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags for the keys that a server takes."""
    group.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help=f"file with API keys of which clients must send one, one a line (${API_KEY_VARIABLE})",
    )
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="one more such key; may be given repeatedly; shown in the list of processes (none)",
    )
    group.add_argument(
        "--admin-key-file",
        type=Path,
        metavar="FILE",
        help="file with the key of operators, for `loong scale`; without one, nothing can be scaled "
        f"(${ADMIN_KEY_VARIABLE})",
    )
    group.add_argument(
        "--admin-key",
        metavar="KEY",
        help="the key of operators; shown in the list of processes (none)",
    )


def add_api_key_flags(parser: argparse._ActionsContainer) -> None:
    """Add the flags for the API key that a client sends."""
    parser.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help=f"file whose first line is the API key to send (${', $'.join(CLIENT_VARIABLES)})",
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help="API key to send; shown in the list of processes (none)"
    )


def add_admin_key_flags(parser: argparse._ActionsContainer) -> None:
    """Add the flags for the admin key that a client sends."""
    parser.add_argument(
        "--admin-key-file",
        type=Path,
        metavar="FILE",
        help=f"file with the admin key of the server (${ADMIN_KEY_VARIABLE})",
    )
    parser.add_argument(
        "--admin-key", metavar="KEY", help="the admin key; shown in the list of processes (none)"
    )


def keys_of_server(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the API keys that a server takes: those typed and in the file, or else the environment's.

    Raises `ConfigError` for a file that cannot be used, and for a variable that is set and empty.
    """
    in_file = () if args.api_key_file is None else keys_in("--api-key-file", args.api_key_file)
    given = tuple(dict.fromkeys((*args.api_key, *in_file)))
    return given or _in_environment(API_KEY_VARIABLE)


def key_of_client(args: argparse.Namespace) -> str | None:
    """Return the API key that a client sends, or None. Raises `ConfigError` for one that cannot be used."""
    given = _given("--api-key", args.api_key, args.api_key_file)
    if given:
        return given[0]
    found = (_in_environment(variable) for variable in CLIENT_VARIABLES if os.environ.get(variable))
    return next((key for (key,) in found), None)


def admin_key(args: argparse.Namespace) -> str | None:
    """Return the admin key of a server or a client, or None.

    Raises `ConfigError` for one that cannot be used, and for a variable that is set and empty.
    """
    found = _given("--admin-key", args.admin_key, args.admin_key_file) or _in_environment(ADMIN_KEY_VARIABLE)
    if len(found) > 1:
        raise ConfigError(f"--admin-key-file {args.admin_key_file} has {len(found)} keys, but one is needed")
    return next(iter(found), None)


def keys_in(flag: str, path: Path) -> tuple[str, ...]:
    """Return the keys in a file, one a line, and warn if other users can read it.

    Raises `ConfigError`, which names the flag, if it cannot be read, is empty, or has a line that is no key.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
        warn_of_readers(flag, path)
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}") from None
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigError(f"{flag} {path} has more than {_MAX_FILE_BYTES} bytes, so it is no file of keys")
    lines = enumerate(content.decode(errors="replace").split("\n"), 1)
    keys = [_checked(line.strip(), f"line {i} of {flag} {path}") for i, line in lines if line.strip()]
    if not keys:
        raise ConfigError(f"{flag} {path} is empty; write one key a line")
    return tuple(keys)


def warn_of_readers(flag: str, path: Path) -> None:
    """Warn if other users can read a file with keys."""
    if path.stat().st_mode & stat.S_IROTH:
        logger.warning("%s %s has keys, and all users can read it: chmod o-r %s", flag, path, path)


def _given(flag: str, typed: str | None, path: Path | None) -> tuple[str, ...]:
    if typed is not None and path is not None:
        raise ConfigError(f"{flag} and {flag}-file are two keys; give one of them")
    if path is not None:
        return keys_in(f"{flag}-file", path)
    return () if typed is None else (_checked(typed, flag),)


def _in_environment(variable: str) -> tuple[str, ...]:
    if (key := os.environ.get(variable)) is None:
        return ()
    if not key.strip():
        raise ConfigError(f"${variable} is empty; unset it if no key is wanted")
    return (_checked(key.strip(), f"${variable}"),)


def _checked(key: str, what: str) -> str:
    if not key:
        raise ConfigError(f"{what} is empty")
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"{what} has characters that no header can hold")
    return key
