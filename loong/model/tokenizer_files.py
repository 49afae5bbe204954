"""The tokenizer of a Hugging Face folder, with the special tokens that its files name, as in transformers."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from loong.core.errors import ConfigError
from loong.foreign_json import NOT_JSON

T = TypeVar("T")

_LLAMA = ("LlamaTokenizer", "CodeLlamaTokenizer")
_LLAMA_TOKENS = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
_QWEN = "Qwen2Tokenizer"
_QWEN_TOKENS = dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>")
_SPACE = "\u2581"  # a space in SentencePiece


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """A tokenizer, the settings in `tokenizer_config.json`, and the special tokens that have names."""

    tokenizer: Tokenizer
    settings: Mapping[str, object]
    special_tokens: Mapping[str, str]  # `bos_token` and so on


class _Token(msgspec.Struct, frozen=True):
    """A token, as files describe it."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool | None = None  # None: unless it is special
    special: bool = False


def read_tokenizer(folder: Path) -> TokenizerFiles:
    """Read the tokenizer of a folder. Raises `ConfigError` if its files are missing or damaged."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; a model folder needs a tokenizer.json to serve text")
    content = path.read_bytes()
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except ValueError as error:
        raise ConfigError(f"{path} is not a tokenizer: {error}") from error
    settings = _read(folder / "tokenizer_config.json", dict[str, object])
    kind, named = _class_name(folder, settings), dict[str, object]()
    if kind in _LLAMA and b'"ByteLevel"' not in content and isinstance(tokenizer.model, BPE):
        _split_like_llama(tokenizer, settings)
        named |= _LLAMA_TOKENS
    elif kind == _QWEN:
        named |= _QWEN_TOKENS
    try:
        special_tokens = _add_special_tokens(tokenizer, folder, named | settings)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"{folder}: the special tokens of its tokenizer are damaged: {error}") from error
    return TokenizerFiles(tokenizer, settings, special_tokens)


def _read(path: Path, kind: type[T]) -> T:
    if not path.is_file():
        return kind()
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except NOT_JSON as error:
        raise ConfigError(f"{path} is damaged: {error}") from error


def _class_name(folder: Path, settings: Mapping[str, object]) -> str:
    """Return the class of a tokenizer in transformers, which may depend on the model."""
    config = _read(folder / "config.json", dict[str, object])
    given = str(settings.get("tokenizer_class") or config.get("tokenizer_class") or "").removesuffix("Fast")
    match config.get("model_type"):
        case "mistral":
            return ""  # a generic one
        case "qwen2":
            return _QWEN
        case "qwen3":
            return given or _QWEN
        case _:
            return given


def _split_like_llama(tokenizer: Tokenizer, settings: Mapping[str, object]) -> None:
    """Put a space before a text, with `legacy` also after special tokens, whatever `tokenizer.json` has."""
    has_prefix = settings.get("add_prefix_space") is not False
    scheme = "always" if settings.get("legacy") else "first"
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=_SPACE, prepend_scheme=scheme if has_prefix else "never", split=False
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)


def _add_special_tokens(tokenizer: Tokenizer, folder: Path, settings: Mapping[str, object]) -> dict[str, str]:
    """Add the tokens that the folder's other files describe, and return those with names."""
    own = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    named, extra = _named(settings), _extra(settings)
    if (described := settings.get("added_tokens_decoder")) is not None:  # the other files are older
        listed = msgspec.convert(described, dict[int, _Token], str_keys=True)
    else:
        older = _read(folder / "special_tokens_map.json", dict[str, object])
        named |= _named(older)
        ids = _read(folder / "added_tokens.json", dict[str, int])
        special = {token.content for token in (*named.values(), *extra)}
        extra += _extra(older)
        listed = {i: _Token(text, special=text in special) for text, i in ids.items() if text not in own}
    tokens = [token for _, token in sorted(listed.items())]
    known = {*own, *(token.content for token in tokens)}
    missing = (token for token in (*named.values(), *extra) if token.content not in known)
    tokens += [msgspec.structs.replace(token, special=True) for token in missing]
    names = {token.content for token in named.values()}
    for token in own.values():
        token.special = token.special or token.content in names
    added = (_added(token, is_special=token.special or token.content in names) for token in tokens)
    tokenizer.add_tokens([*own.values(), *added])
    return {name: token.content for name, token in named.items()}


def _named(settings: Mapping[str, object]) -> dict[str, _Token]:
    """Return the tokens with names, as `bos_token`."""
    values = {name: value for name, value in settings.items() if name.endswith("_token")}
    if isinstance(more := settings.get("extra_special_tokens"), dict):
        values |= more
    return {name: token for name, value in values.items() if (token := _token(value)) is not None}


def _extra(settings: Mapping[str, object]) -> list[_Token]:
    """Return the special tokens without names, under the newer or the older key."""
    values = settings.get("extra_special_tokens")
    if not values or not isinstance(values, list):
        values = settings.get("additional_special_tokens")
    values = values if isinstance(values, list) else []
    return [token for value in values if (token := _token(value)) is not None]


def _token(value: object) -> _Token | None:
    """Return a token that is given as a text or an object, or None for anything else."""
    if isinstance(value, str):
        return _Token(value, special=True)
    return msgspec.convert(value, _Token) if isinstance(value, dict) else None


def _added(token: _Token, *, is_special: bool) -> AddedToken:
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=not is_special if token.normalized is None else token.normalized,
        special=is_special,
    )
