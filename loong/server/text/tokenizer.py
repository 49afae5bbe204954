"""The tokenizer of a model, and its chat templates."""

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeVar, TypeVarTuple

from tokenizers import Tokenizer as Backend

from loong.core.errors import InvalidRequestError
from loong.core.request import TokenId
from loong.model.tokenizer_files import read_tokenizer
from loong.processes.free_memory import give_back_free_memory
from loong.server.text.chat_template import ChatTemplate, read_chat_templates
from loong.server.text.special_tokens import Literals

_LONG_TEXT = 4096  # characters; more are encoded in a thread
_HUGE_TEXT = 1 << 18  # characters; more take seconds, and their memory is given back
_NUM_THREADS = 2  # for long texts, and for huge ones: each takes some 100 bytes a character
_FALLBACK_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a byte in SentencePiece models
_REPLACEMENT = "\ufffd"
_BLANK = "\u2581"  # in SentencePiece models

_Given = TypeVarTuple("_Given")
_Result = TypeVar("_Result")


class _Named(NamedTuple):
    """The text of one token inside a text, its display name, and its bytes."""

    text: str
    name: str
    encoded: bytes


class Tokenizer:
    """Text to token ids and back, by Hugging Face's fast tokenizers."""

    def __init__(
        self,
        backend: Backend,
        *,
        eos_token_ids: Iterable[TokenId] = (),
        chat_template: ChatTemplate | None = None,
        tool_template: ChatTemplate | None = None,
        folder: Path | None = None,
    ) -> None:
        """Take over a tokenizer, without truncation and padding. `folder` is its source.

        `tool_template` is for chats with tools, if the model has another template for them.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.eos_token_ids = tuple(sorted(set(eos_token_ids)))
        self.chat_template = chat_template
        self.tool_template = chat_template if tool_template is None else tool_template
        self.folder = folder
        self._names: dict[TokenId, _Named] = {}
        self._texts: dict[tuple[TokenId, bool], str] = {}
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "tokenizer")
        self._threads_of_huge = ThreadPoolExecutor(_NUM_THREADS, "tokenizer-huge")

    @classmethod
    def from_folder(cls, folder: Path, eos_token_ids: Iterable[TokenId] = ()) -> "Tokenizer":
        """Read the tokenizer of a model folder. Raises `ConfigError` if its files are missing or damaged.

        `eos_token_ids` are the model's, in addition to the tokenizer's own.
        """
        files = read_tokenizer(folder)
        config, special_tokens = files.settings, files.special_tokens
        eos = special_tokens.get("eos_token")
        eos_id = files.tokenizer.token_to_id(eos) if eos is not None else None
        chat_template, tool_template = read_chat_templates(folder, config, special_tokens)
        return cls(
            files.tokenizer,
            eos_token_ids=[*eos_token_ids, *([] if eos_id is None else [eos_id])],
            chat_template=chat_template,
            tool_template=tool_template,
            folder=folder,
        )

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[TokenId]:
        """Return the token ids of a text, with added special tokens if wanted.

        A long text is encoded in a thread.
        """
        (token_ids,) = await self.encode_all([text], add_special_tokens=add_special_tokens)
        return token_ids

    async def encode_all(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[TokenId]]:
        """Return the token ids of each text, as `encode` does."""
        if (num_characters := sum(map(len, texts))) <= _LONG_TEXT:
            return self._encode(texts, add_special_tokens)
        return await self._in_thread(num_characters, self._encode, texts, add_special_tokens)

    def _encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[TokenId]]:
        return _encoded(self._backend, list(texts), add_special_tokens=add_special_tokens)

    async def encode_pieces(
        self, pieces: Sequence[tuple[str, bool]], *, add_special_tokens: bool
    ) -> list[TokenId]:
        """Return the token ids of a text in pieces. In pieces marked true, special tokens are plain text."""
        if len(pieces) == 1 and not pieces[0][1]:
            return await self.encode(pieces[0][0], add_special_tokens=add_special_tokens)
        num_characters = sum(len(text) for text, _ in pieces)
        return await self._in_thread(num_characters, self._encode_pieces, pieces, add_special_tokens)

    def _encode_pieces(self, pieces: Sequence[tuple[str, bool]], add_special_tokens: bool) -> list[TokenId]:
        token_ids = self._encode([""], add_special_tokens)[0]
        for number, (text, is_literal) in enumerate(pieces):
            backend = self._literal_backend if is_literal else self._backend
            token_ids += self._ids_inside(backend, text) if number else _ids(backend, text)
        return token_ids

    def _ids_inside(self, backend: Backend, text: str) -> list[TokenId]:
        """Return the token ids of a text after another one, without the blank that may begin a text.

        A line break before the text takes that blank.
        """
        if line_break := self._line_break:
            token_ids = _ids(backend, f"\n{text}")
            if token_ids[: len(line_break)] == line_break:
                return token_ids[len(line_break) :]
        return _ids(backend, text)

    async def text(self, token_ids: Sequence[TokenId]) -> str:
        """Return the text of a whole sequence, including special tokens; in a thread."""
        (text,) = await self._in_thread(  # decode_batch releases the interpreter
            len(token_ids), self._backend.decode_batch, [token_ids], False
        )
        return str(text)

    async def _in_thread(self, size: int, call: Callable[[*_Given], _Result], *given: *_Given) -> _Result:
        """Return what a call returns. Few run at a time: their memory stays with the process.

        Those of a huge `size` have threads of their own, so that others need not wait for them.
        """
        threads = self._threads_of_huge if size > _HUGE_TEXT else self._threads
        return await asyncio.get_running_loop().run_in_executor(threads, call, *given)

    def decode(self, token_ids: Sequence[TokenId], *, skip_special_tokens: bool = True) -> str:
        """Return the text of a whole sequence. Invalid bytes become U+FFFD."""
        if len(token_ids) == 1:  # most contexts are of one token
            return self._text_of_one(token_ids[0], skip_special_tokens)
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def _text_of_one(self, token_id: TokenId, skip_special_tokens: bool) -> str:
        """Return the text of one token, cached."""
        key = (token_id, skip_special_tokens)
        text = self._texts.get(key)
        if text is None:
            text = self._texts[key] = self._backend.decode(
                [token_id], skip_special_tokens=skip_special_tokens
            )
        return text

    def is_silent(self, token_id: TokenId, *, skip_special_tokens: bool) -> bool:
        """Return whether decoding drops the token: a special token that is skipped, or an unknown id."""
        is_skipped = skip_special_tokens and token_id in self._special_token_ids
        return is_skipped or token_id not in self._known_token_ids

    def is_fallback_byte(self, token_id: TokenId) -> bool:
        """Return whether the token stands for one byte without a piece in the vocabulary."""
        return token_id in self._fallback_byte_ids

    def piece(self, token_id: TokenId) -> str:
        """Return the vocabulary's piece of a token, which may differ from its text; "" if there is none."""
        return self._backend.id_to_token(token_id) or ""

    def token_text(self, token_id: TokenId) -> str:
        """Return the text of one token inside a text. At the beginning, a decoder may drop its blank."""
        return self._named(token_id).text

    def token_name(self, token_id: TokenId) -> str:
        """Return a display name of one token: its text, or its bytes if they are not whole text."""
        return self._named(token_id).name

    def token_bytes(self, token_id: TokenId) -> bytes:
        """Return the UTF-8 bytes of one token, which may begin or end inside a character."""
        return self._named(token_id).encoded

    def _named(self, token_id: TokenId) -> _Named:
        """Return the texts of a token, cached because log probabilities need twenty for each token."""
        named = self._names.get(token_id)
        if named is None:
            first = self.decode([token_id], skip_special_tokens=False)
            text = self.decode([token_id, token_id], skip_special_tokens=False)[len(first) :]
            encoded = self._bytes_of(token_id, text)
            is_cut = _REPLACEMENT in text
            name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in encoded) if is_cut else text
            named = self._names[token_id] = _Named(text, name, encoded)
        return named

    def _bytes_of(self, token_id: TokenId, text: str) -> bytes:
        token = self.piece(token_id)
        if match := _FALLBACK_BYTE.fullmatch(token):
            return bytes.fromhex(match[1])
        if _REPLACEMENT in text and all(character in _BYTE_OF_CHARACTER for character in token):
            return bytes(_BYTE_OF_CHARACTER[character] for character in token)
        return text.encode()

    def special_token_ids(self, texts: Iterable[str]) -> frozenset[TokenId]:
        """Return the ids of those texts that are special tokens."""
        wanted = frozenset(texts)
        return frozenset(i for i, token in self._special_tokens.items() if token in wanted)

    def literals(self) -> Literals:
        """Return marks that protect clients' texts from becoming this tokenizer's special tokens."""
        return Literals(self._special_tokens.values())

    def make_ahead(self) -> None:
        """Prepare what the first texts need. With a large vocabulary this takes a second."""
        _ = self._literal_backend, self._known_token_ids, self._fallback_byte_ids

    @cached_property
    def _known_token_ids(self) -> frozenset[TokenId]:
        return frozenset(self._backend.get_vocab().values())

    @cached_property
    def _fallback_byte_ids(self) -> frozenset[TokenId]:
        vocabulary = self._backend.get_vocab()
        return frozenset(i for token, i in vocabulary.items() if _FALLBACK_BYTE.fullmatch(token))

    @cached_property
    def _line_break(self) -> list[TokenId]:
        """Return the tokens of a line break and the blank before it; none if no blank begins a text."""
        token_ids = _ids(self._backend, "\n")
        return token_ids if token_ids and self.piece(token_ids[0]).startswith(_BLANK) else []

    @cached_property
    def _literal_backend(self) -> Backend:
        """Return the backend without special tokens, which become plain text."""
        backend = Backend.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        return backend

    @cached_property
    def _special_tokens(self) -> Mapping[TokenId, str]:
        added = self._backend.get_added_tokens_decoder()
        return {token_id: token.content for token_id, token in added.items() if token.special}

    @cached_property
    def _special_token_ids(self) -> frozenset[TokenId]:
        return frozenset(self._special_tokens)


def _ids(backend: Backend, text: str) -> list[TokenId]:
    (token_ids,) = _encoded(backend, [text], add_special_tokens=False)
    return token_ids


def _encoded(backend: Backend, texts: list[str], *, add_special_tokens: bool) -> list[list[TokenId]]:
    """Return the ids of each text.

    Raises `InvalidRequestError` for a text that the library gives up: a pattern backtracks too long on it.
    """
    try:
        encodings = backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # whose class cannot be imported; it is no Exception
            raise
        message = f"the model's tokenizer cannot encode this text: {error}"
        raise InvalidRequestError(message, param="prompt") from error
    token_ids = [encoding.ids for encoding in encodings]
    del encodings
    if sum(map(len, texts)) > _HUGE_TEXT:
        give_back_free_memory()
    return token_ids


def _byte_characters() -> dict[str, int]:
    """Return the byte of each character in a byte-level vocabulary: its own if visible, else in order."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF_CHARACTER = _byte_characters()
