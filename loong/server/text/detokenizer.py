"""Incremental detokenization: text of tokens as they arrive, without incomplete characters."""

from collections.abc import Collection
from typing import Protocol

from loong.core.request import TokenId

_REPLACEMENT = "\ufffd"
_MAX_PENDING = 16


class TokenDecoder(Protocol):
    """The methods of a tokenizer that detokenization needs."""

    def decode(self, token_ids: list[TokenId], *, skip_special_tokens: bool) -> str:
        """Return the text of a whole sequence."""
        ...

    def is_silent(self, token_id: TokenId, *, skip_special_tokens: bool) -> bool:
        """Return whether decoding skips the token."""
        ...

    def is_fallback_byte(self, token_id: TokenId) -> bool:
        """Return whether the token is a fallback byte, whose text depends on the whole run of such bytes."""
        ...


class IncrementalDetokenizer:
    """Turns tokens into text one by one. The pieces together equal the text of all tokens decoded at once.

    New tokens can only change the end of the text: a last replacement character may be the start of a real
    one, and a run of fallback bytes is decoded as a whole. Such an end is held back. Only a window of recent
    tokens is decoded. It begins with tokens whose text has been returned, as context.
    """

    def __init__(
        self,
        decoder: TokenDecoder,
        *,
        skip_special_tokens: bool = True,
        kept_token_ids: Collection[TokenId] = (),
    ) -> None:
        """Set up. `skip_special_tokens` skips special tokens, except `kept_token_ids`."""
        self._decoder = decoder
        self._kept_token_ids = kept_token_ids
        self._skip_special_tokens = skip_special_tokens
        self._window: list[TokenId] = []
        self._num_context = 0  # tokens
        self._num_emitted = 0  # characters of the window's text

    def add(self, token_id: TokenId) -> str:
        """Take one token, and return the text that can no longer change, often none."""
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
        """Return the text that was held back, after the last token."""
        piece = self._decode(self._window)[self._num_emitted :]
        self._num_emitted += len(piece)
        return piece

    def _decode(self, token_ids: list[TokenId]) -> str:
        return self._decoder.decode(token_ids, skip_special_tokens=self._skip_special_tokens)

    def _move_window(self, num_dropped: int) -> None:
        """Move the start of the window past `num_dropped` tokens, keeping the later ones as context."""
        self._window = self._window[num_dropped:]
        self._num_context = len(self._window)
        self._num_emitted = len(self._decode(self._window))

    def _split_invalid_text(self, text: str) -> None:
        """Move the window's start into a long run of invalid bytes, if this changes no text.

        A cut inside a character is visible: its halves decode to two replacement characters instead of one.
        """
        for cut in range(len(self._window) - 1, self._num_context, -1):
            before, after = self._decode(self._window[:cut]), self._decode(self._window[cut:])
            if before + after == text and len(before) <= self._num_emitted:
                self._window = self._window[cut:]
                self._num_context = 0
                self._num_emitted -= len(before)
                return
