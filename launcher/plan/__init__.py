"""`loong plan`: which mix of devices serves a workload at the least price."""

from loong.launcher.plan.command import add_parser, run

__all__ = ["add_parser", "run"]
