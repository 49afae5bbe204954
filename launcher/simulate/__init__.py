"""`loong simulate`: policies under load in virtual time, by the loop that serves real clusters."""

from loong.launcher.simulate.command import add_parser

__all__ = ["add_parser"]
