"""`loong workload`: what a spec stands for, told in tables and pictures (`tables`), or written to a file."""

from loong.launcher.workload.command import add_parser

__all__ = ["add_parser"]
