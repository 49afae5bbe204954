"""`loong simulate`: policies under load in virtual time, by the loop that serves real clusters.

A policy's devices are a `cluster`; one load on it is a `run`; the runs of a sweep or a `search` are `points`,
made in parallel processes; a `report` shows them. From Python, `points.run_point` simulates one.
"""

from loong.launcher.simulate.command import add_parser

__all__ = ["add_parser"]
