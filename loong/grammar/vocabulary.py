"""The text of every token of a tokenizer, for grammars."""

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from loong.model.tokenizer_files import read_tokenizer

if TYPE_CHECKING:
    from xgrammar import TokenizerInfo

_NEVER = ""  # the text of a token that xgrammar never allows
_NEVER_IN_JSON = frozenset(range(0x20)) - {*b"\r\n"}  # tabs are allowed with other blanks
_FALLBACK_BYTE = "<0x00>"  # a vocabulary with this piece has byte fallback


def read_vocabulary(folder: Path, vocab_size: int, *, is_json: bool) -> "TokenizerInfo":
    """Return the tokens of a model folder's tokenizer, for `vocab_size` token ids. Ids without a token never
    occur.

    In JSON, tokens with control characters never occur either.
    """
    from xgrammar import TokenizerInfo, VocabType  # an extra, and slow to import

    tokenizer = read_tokenizer(folder).tokenizer
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    tokens = [""] * min(vocab_size, max(vocabulary.values()) + 1)
    for token, token_id in vocabulary.items():
        if token_id < len(tokens):
            tokens[token_id] = token
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    kind = VocabType.RAW
    if _FALLBACK_BYTE in vocabulary:
        kind = VocabType.BYTE_FALLBACK
    elif '"ByteLevel"' in msgspec.json.encode(msgspec.json.decode(tokenizer.to_str())["decoder"]).decode():
        kind = VocabType.BYTE_LEVEL
    written = TokenizerInfo(tokens, kind, stop_token_ids=[]).decoded_vocab
    never = _NEVER_IN_JSON if is_json else frozenset[int]()
    texts = [
        _NEVER if token in special or not never.isdisjoint(text) else token
        for token, text in zip(tokens, written, strict=True)
    ]
    return TokenizerInfo(texts, kind, vocab_size=vocab_size, stop_token_ids=[])
