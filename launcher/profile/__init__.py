"""`loong profile`: measures real workers and fits the cost model to them.

On a `cluster` one plan runs at a time. `scenarios` generate the plans; `measure` repeats and times them;
`found` holds the fit with its errors, which is written to a file. A `session` is the whole profile.
"""

from loong.launcher.profile.command import add_parser, run

__all__ = ["add_parser", "run"]
