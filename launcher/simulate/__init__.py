"""`loong simulate`: policies under load in virtual time, by the loop that serves real clusters.

A policy's devices are a `cluster`; one load on it is a `run`; the runs of a sweep or a `search` are `points`,
made in parallel processes; a `report` shows them. To try a policy from Python: `run.simulate_policy`.
"""

from loong.launcher.simulate.command import add_parser, run

__all__ = ["add_parser", "run"]
