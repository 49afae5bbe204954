"""The speed of an answer, as the terminal sees it."""

from dataclasses import dataclass, field
from time import monotonic

from loong.launcher.chat.client import Piece


@dataclass
class AnswerSpeed:
    """The time to the first text of an answer, and the rate of the tokens after it."""

    asked_at: float = field(default_factory=monotonic)
    first_at: float | None = None
    last_at: float = 0.0
    num_tokens: int | None = None  # None: the server does not say

    def take(self, piece: Piece) -> None:
        """Take the next piece, which has just come."""
        if piece.num_tokens is not None:
            self.num_tokens = piece.num_tokens
        if piece.text:
            self.last_at = monotonic()
            self.first_at = self.last_at if self.first_at is None else self.first_at

    def __str__(self) -> str:
        """Return both in words; the rate only where more than one token was counted."""
        if self.first_at is None:
            return ""
        words = f"first token after {self.first_at - self.asked_at:.2f} s"
        seconds = self.last_at - self.first_at
        if self.num_tokens is None or self.num_tokens < 2 or seconds <= 0:
            return words
        return f"{words}, then {(self.num_tokens - 1) / seconds:.1f} tokens/s"
