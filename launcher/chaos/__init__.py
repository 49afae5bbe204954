"""`loong chaos`: injects faults into a server under load, and compares its outputs with undisturbed ones."""

from loong.launcher.chaos.command import add_parser, run

__all__ = ["add_parser", "run"]
