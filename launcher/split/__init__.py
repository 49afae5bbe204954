"""`loong split`: cuts a model at its attention, and shows what travels and what stays."""

from loong.launcher.split.command import add_parser, run

__all__ = ["add_parser", "run"]
