"""A Hugging Face tokenizer from the metadata of a GGUF file."""

from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from loong.core.errors import ConfigError
from loong.model.gguf.metadata import Metadata
from loong.model.gguf.splitting import (
    ADDING_BOS,
    PRE_TOKENIZER_NAMES,
    WHOLE_WORDS,
    normalizer,
    pre_tokenizer,
)

CONTROL, USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type
_SPACE = "\u2581"  # a space in SentencePiece
_NAMED: Final = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_PREFIX = "tokenizer.ggml"
MAX_TOKEN_LETTERS: Final = 1024  # the time to find a token's merges grows with the square


def gguf_tokenizer(metadata: Metadata) -> Tokenizer:
    """Return the tokenizer of a file. Raises ConfigError naming an unsupported kind."""
    kind = metadata.required(f"{_PREFIX}.model", str)
    match kind:
        case "gpt2":
            tokenizer = _byte_level(metadata)
        case "llama":
            tokenizer = _sentence_piece(metadata)
        case _:
            raise metadata.refusal(f"{_PREFIX}.model", "one of gpt2, llama")
    _add_special_tokens(tokenizer, metadata)
    bos = named_tokens(metadata).get("bos_token")
    if adds_bos(metadata) and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return tokenizer


def named_tokens(metadata: Metadata) -> dict[str, str]:
    """Return the texts of the special tokens that the file names, by Hugging Face's names."""
    tokens = metadata.items(f"{_PREFIX}.tokens", str)
    named = {}
    for name, own_name in _NAMED.items():
        key = f"{_PREFIX}.{own_name}_token_id"
        token_id = metadata.optional(key, int)
        if token_id is None:
            continue
        if not 0 <= token_id < len(tokens):
            raise metadata.refusal(key, f"below the number of tokens, {len(tokens)}")
        named[name] = tokens[token_id]
    return named


def adds_bos(metadata: Metadata) -> bool:
    """Return whether a prompt begins with the BOS token: by the file, else by the tokenizer's kind."""
    is_reported = metadata.optional(f"{_PREFIX}.add_bos_token", bool)
    if is_reported is not None:
        return is_reported
    return (
        metadata.values.get(f"{_PREFIX}.model") == "llama"
        or metadata.values.get(f"{_PREFIX}.pre") in ADDING_BOS
    )


def _vocabulary(metadata: Metadata) -> dict[str, int]:
    tokens = metadata.items(f"{_PREFIX}.tokens", str)
    if not tokens:
        raise ConfigError(f"{metadata.path} lacks {_PREFIX}.tokens, without which no text can be served")
    if (longest := max(map(len, tokens))) > MAX_TOKEN_LETTERS:
        raise ConfigError(
            f"{metadata.path}: {_PREFIX}.tokens must have at most {MAX_TOKEN_LETTERS:,} letters each, "
            f"got {longest:,}"
        )
    return {token: token_id for token_id, token in enumerate(tokens)}


def _byte_level(metadata: Metadata) -> Tokenizer:
    """Return a byte-level BPE, with the file's merges in order of priority."""
    name = metadata.required(f"{_PREFIX}.pre", str)
    if name not in PRE_TOKENIZER_NAMES:
        raise metadata.refusal(f"{_PREFIX}.pre", f"one of {', '.join(PRE_TOKENIZER_NAMES)}")
    vocabulary = _vocabulary(metadata)
    merges = []
    for merge in metadata.items(f"{_PREFIX}.merges", str):
        left, _, right = merge.partition(" ")
        if left + right not in vocabulary or left not in vocabulary or right not in vocabulary:
            raise ConfigError(f"{metadata.path}: {_PREFIX}.merges has {merge!r}, which is not in its tokens")
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=name in WHOLE_WORDS))
    if (normal := normalizer(name)) is not None:
        tokenizer.normalizer = normal
    tokenizer.pre_tokenizer = pre_tokenizer(name)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(metadata: Metadata) -> Tokenizer:
    """Return a BPE with byte fallback, like Hugging Face's tokenizer of Llama 2."""
    vocabulary = _vocabulary(metadata)
    has_prefix = metadata.optional(f"{_PREFIX}.add_space_prefix", bool) is not False
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges_by_score(vocabulary, metadata.items(f"{_PREFIX}.scores", float)),
            unk_token=named_tokens(metadata).get("unk_token"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if has_prefix else spaces
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    return tokenizer


def _merges_by_score(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Return all ways to join two tokens to a third, those with high scores first."""
    merges = []
    for token, token_id in vocabulary.items():
        halves = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        score = scores[token_id] if token_id < len(scores) else 0.0
        merges += [
            (-score, vocabulary[left], vocabulary[right], (left, right))
            for left, right in halves
            if left in vocabulary and right in vocabulary
        ]
    return [pair for *_, pair in sorted(merges)]


def _add_special_tokens(tokenizer: Tokenizer, metadata: Metadata) -> None:
    types = metadata.items(f"{_PREFIX}.token_type", int)
    for token, token_type in zip(metadata.items(f"{_PREFIX}.tokens", str), types, strict=False):
        added = AddedToken(token, normalized=False, special=token_type == CONTROL)
        if token_type == CONTROL:
            tokenizer.add_special_tokens([added])
        elif token_type == USER_DEFINED:
            tokenizer.add_tokens([added])
