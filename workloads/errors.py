"""Errors of measurements."""

from loong.core.errors import LoongError


class ServerUnusableError(LoongError):
    """The server under test does not start, does not answer, or fails its first requests."""
