"""`loong profile`: a `session` measures real workers and fits the cost model to them."""

from loong.launcher.profile.command import add_parser, run

__all__ = ["add_parser", "run"]
