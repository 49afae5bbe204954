"""`loong models`: the models that a name alone serves."""

from loong.launcher.models.command import add_parser, run

__all__ = ["add_parser", "run"]
