"""JSON of others: files, servers and models."""

from typing import Final

import msgspec

NOT_JSON: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Raised where a text is no JSON, has values of other types, or is nested too deeply to be decoded."""
