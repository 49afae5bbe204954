"""`loong chat`: a conversation in the terminal (`session`) with an OpenAI-compatible server (`client`)."""

from loong.launcher.chat.command import add_parser, run

__all__ = ["add_parser", "run"]
