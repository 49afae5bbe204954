"""A process of a server that does nothing but end."""

import sys

from loong.processes.child import config_of, leave_signals_to_parent


def main() -> None:
    """Exit with the code of the config; without one, when standard input is closed."""
    leave_signals_to_parent()
    config = config_of(sys.stdin.buffer.readline(), dict[str, int | None])
    if config["code"] is None:
        sys.stdin.buffer.read()
    sys.exit(config["code"])
