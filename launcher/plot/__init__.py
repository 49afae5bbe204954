"""`loong plot`: the pictures and the report of runs that were written to folders."""

from loong.launcher.plot.command import add_parser

__all__ = ["add_parser"]
