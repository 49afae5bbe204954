"""Models by name: built in (`packaged`), of the hub (`hub`), or any (`source`); and `loong models`."""

from loong.launcher.models.command import add_parser, run

__all__ = ["add_parser", "run"]
