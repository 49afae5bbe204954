"""`loong explain`: what a decision log tells of one request, or of all.

Lines of the log are indexed by request (`index`), put in order as steps of one request (`trail`), equal ones
joined (`fold`), and told with what was measured (`story`), in words (`words`) or as a list (`listing`).
"""

from loong.launcher.explain.command import add_parser, run

__all__ = ["add_parser", "run"]
