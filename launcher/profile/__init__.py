"""`loong profile`: measures real workers and fits the cost model to them.

On a `cluster` one plan runs at a time; `scenarios` say which; `measure` repeats and times them; what is
`found` by the fit, with its errors, is written to a file. A `session` is all of it.
"""

from loong.launcher.profile.command import add_parser, run

__all__ = ["add_parser", "run"]
