"""`loong explain`: the decision log's account of one request, or of all (`listing`)."""

from loong.launcher.explain.command import add_parser, run

__all__ = ["add_parser", "run"]
