"""Incremental detokenization: text of tokens as they arrive, without incomplete characters."""

from collections.abc import Collection, Sequence
from itertools import takewhile
from typing import Protocol

from loong.core.request import TokenId

_REPLACEMENT = "\ufffd"
_MAX_PENDING = 16
_MAX_CONTEXT = 1024  # tokens of the prompt, if it ends with a run of fallback bytes
_MAX_BYTES = 4  # of a character


class TokenDecoder(Protocol):
    """The methods of a tokenizer that detokenization needs."""

    def decode(self, token_ids: Sequence[TokenId], *, skip_special_tokens: bool) -> str:
        """Return the text of a whole sequence."""
        ...

    def is_silent(self, token_id: TokenId, *, skip_special_tokens: bool) -> bool:
        """Return whether decoding skips the token."""
        ...

    def is_fallback_byte(self, token_id: TokenId) -> bool:
        """Return whether the token is a fallback byte, whose text depends on the whole run of such bytes."""
        ...


class IncrementalDetokenizer:
    """Turns tokens into text one by one. The text of a prompt and the pieces together equal the text of all
    tokens decoded at once.

    A decoder may treat the first token of a text differently: it drops the blank of `▁the`. So the prompt's
    last tokens are the context of the first pieces. If the prompt ends inside a character, the pieces begin
    with that character.

    New tokens can only change the end of the text: a last replacement character may be the start of a real
    one, and a run of fallback bytes is decoded as a whole. Such an end is held back. Only a window of recent
    tokens is decoded. It begins with tokens whose text has been returned, as context.
    """

    def __init__(
        self,
        decoder: TokenDecoder,
        *,
        prompt_token_ids: Sequence[TokenId] = (),
        skip_special_tokens: bool = True,
        kept_token_ids: Collection[TokenId] = (),
    ) -> None:
        """Set up. `skip_special_tokens` skips special tokens, except `kept_token_ids`."""
        self._decoder = decoder
        self._kept_token_ids = kept_token_ids
        self._skip_special_tokens = skip_special_tokens
        self._window = self._end_of(prompt_token_ids)
        self._num_context = len(self._window)  # tokens
        self._emitted = self._decode(self._window)  # text at the beginning of the window's

    def add(self, token_id: TokenId) -> str:
        """Take one token, and return the text that can no longer change, often none."""
        if self._is_silent(token_id):
            return ""
        self._window.append(token_id)
        if self._decoder.is_fallback_byte(token_id):
            return ""
        text = self._decode(self._window)
        certain = text.removesuffix(_REPLACEMENT)
        piece = self._take_new(certain)
        if piece and certain == text:
            self._move_window(self._num_context)
        elif len(self._window) - self._num_context > _MAX_PENDING:
            self._split_invalid_text(text)
        return piece

    def finish(self) -> str:
        """Return the text that was held back, after the last token."""
        return self._take_new(self._decode(self._window))

    def _take_new(self, text: str) -> str:
        """Return the part of the window's text that was not emitted, and record that it is."""
        num_emitted = len(self._emitted)
        if not text.startswith(self._emitted):  # the prompt ended inside a character
            pairs = zip(self._emitted, text, strict=False)
            num_emitted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        piece = text[num_emitted:]
        if piece:
            self._emitted = text
        return piece

    def _is_silent(self, token_id: TokenId) -> bool:
        return token_id not in self._kept_token_ids and self._decoder.is_silent(
            token_id, skip_special_tokens=self._skip_special_tokens
        )

    def _end_of(self, prompt_token_ids: Sequence[TokenId]) -> list[TokenId]:
        """Return the last tokens of a prompt that have a text, back to one that begins with a character."""
        end: list[TokenId] = []
        for token_id in reversed(prompt_token_ids[-_MAX_CONTEXT:]):
            if not self._is_silent(token_id):
                end.insert(0, token_id)
                is_run = self._decoder.is_fallback_byte(token_id)
                if not is_run and not self._is_cut([token_id]):
                    return end
        if len(prompt_token_ids) <= _MAX_CONTEXT:
            return end
        return next((end[cut:] for cut in range(_MAX_BYTES) if not self._is_cut(end[cut:])), end)

    def _is_cut(self, token_ids: list[TokenId]) -> bool:
        """Return whether the text begins inside a character."""
        return self._decode(token_ids).startswith(_REPLACEMENT)

    def _decode(self, token_ids: list[TokenId]) -> str:
        return self._decoder.decode(token_ids, skip_special_tokens=False) if token_ids else ""

    def _move_window(self, num_dropped: int) -> None:
        """Move the start of the window past `num_dropped` tokens, keeping the later ones as context."""
        self._window = self._window[num_dropped:]
        self._num_context = len(self._window)
        self._emitted = self._decode(self._window)

    def _split_invalid_text(self, text: str) -> None:
        """Move the window's start into a long run of invalid bytes, if this changes no text.

        A cut inside a character is visible: its halves decode to two replacement characters instead of one.
        """
        for cut in range(len(self._window) - 1, self._num_context, -1):
            before, after = self._decode(self._window[:cut]), self._decode(self._window[cut:])
            if before + after == text and self._emitted.startswith(before):
                self._window = self._window[cut:]
                self._num_context = 0
                self._emitted = self._emitted.removeprefix(before)
                return
