"""`loong workload`: describes a workload in tables and pictures (`tables`), or saves its requests."""

from loong.launcher.workload.command import add_parser

__all__ = ["add_parser"]
