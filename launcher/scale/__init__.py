"""`loong scale`: adds instances to a running server (`client`), or removes some."""

from loong.launcher.scale.command import add_parser, run

__all__ = ["add_parser", "run"]
