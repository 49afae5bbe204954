"""Text of tokens as they come, never a character too early."""

from collections.abc import Collection
from typing import Protocol

from loong.core.request import TokenId

_REPLACEMENT = "\ufffd"
_MAX_PENDING = 16


class TokenDecoder(Protocol):
    """What detokenisation asks of a tokenizer."""

    def decode(self, token_ids: list[TokenId], *, skip_special_tokens: bool) -> str:
        """Text of a whole sequence."""
        ...

    def is_silent(self, token_id: TokenId, *, skip_special_tokens: bool) -> bool:
        """Whether decoding drops the token before it looks at any other."""
        ...

    def is_fallback_byte(self, token_id: TokenId) -> bool:
        """Whether the token is one byte, and how a run of such reads depends on the whole run."""
        ...


class IncrementalDetokenizer:
    """Turns tokens into text one by one; all pieces together are what decoding them at once gives.

    Only the end of a text can change when more tokens come: a last replacement character may be the first
    bytes of a real one, and a run of fallback bytes is read as a whole. Those are held back. A window of
    recent tokens is decoded, not all: a first part whose text is out, as context, and what came since.
    """

    def __init__(
        self,
        decoder: TokenDecoder,
        *,
        skip_special_tokens: bool = True,
        kept_token_ids: Collection[TokenId] = (),
    ) -> None:
        """Skip special tokens if asked, but for those that are kept."""
        self._decoder = decoder
        self._kept_token_ids = kept_token_ids
        self._skip_special_tokens = skip_special_tokens
        self._window: list[TokenId] = []
        self._num_context = 0  # tokens
        self._num_emitted = 0  # characters of the window's text

    def add(self, token_id: TokenId) -> str:
        """Take one token; return the text that is certain by now, often none."""
        if token_id in self._kept_token_ids:
            text = self.finish() + self._decoder.decode([token_id], skip_special_tokens=False)
            self._window, self._num_context, self._num_emitted = [], 0, 0
            return text
        if self._decoder.is_silent(token_id, skip_special_tokens=self._skip_special_tokens):
            return ""
        self._window.append(token_id)
        if self._decoder.is_fallback_byte(token_id):
            return ""
        text = self._decode(self._window)
        certain = text.removesuffix(_REPLACEMENT)
        piece = certain[self._num_emitted :]
        self._num_emitted += len(piece)
        if piece and certain == text:
            self._move_window(self._num_context)
        elif len(self._window) - self._num_context > _MAX_PENDING:
            self._split_invalid_text(text)
        return piece

    def finish(self) -> str:
        """Return the text that was held back: no token comes any more."""
        piece = self._decode(self._window)[self._num_emitted :]
        self._num_emitted += len(piece)
        return piece

    def _decode(self, token_ids: list[TokenId]) -> str:
        return self._decoder.decode(token_ids, skip_special_tokens=self._skip_special_tokens)

    def _move_window(self, num_dropped: int) -> None:
        """Keep the tokens after the first `num_dropped` as context of those to come: their text is out."""
        self._window = self._window[num_dropped:]
        self._num_context = len(self._window)
        self._num_emitted = len(self._decode(self._window))

    def _split_invalid_text(self, text: str) -> None:
        """Begin the window later inside a long run of invalid bytes, where that changes no text.

        A cut inside a character shows: its halves read as two replacement characters, not as one.
        """
        for cut in range(len(self._window) - 1, self._num_context, -1):
            before, after = self._decode(self._window[:cut]), self._decode(self._window[cut:])
            if before + after == text and len(before) <= self._num_emitted:
                self._window = self._window[cut:]
                self._num_context = 0
                self._num_emitted -= len(before)
                return
