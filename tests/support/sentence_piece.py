"""Small tokenizers of the SentencePiece family, as those of Llama 2, Mistral and TinyLlama."""

from itertools import pairwise
from typing import Literal, TypeAlias

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

Kind: TypeAlias = Literal["prepend", "first", "always"]

START, END = "<s>", "</s>"
_WORDS = ("▁My", "▁name", "▁is", "▁the", "▁cat", "▁▁", "the")
_LETTERS = "▁Mynameisthect.,日[]{}:0123456789\n"


def sentence_piece(kind: Kind = "prepend", *, adds_start: bool = True) -> Tokenizer:
    """Return a BPE with byte fallback, whose words begin with a mark for the blank before them.

    `prepend` has the normalizer of the first conversions, which puts a mark after special tokens as well.
    The others have a pre-tokenizer, which puts it there (`always`), or at the beginning alone (`first`).
    """
    vocab = {token: i for i, token in enumerate(["<unk>", START, END, *map("<0x{:02X}>".format, range(256))])}
    for letter in _LETTERS:
        vocab.setdefault(letter, len(vocab))
    merges = []
    for word in _WORDS:
        beginnings = [word[:length] for length in range(1, len(word) + 1)]
        for shorter, longer in pairwise(beginnings):
            if longer not in vocab:
                vocab[longer] = len(vocab)
                merges.append((shorter, longer[-1]))
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    if kind == "prepend":
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(steps)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", START, END)])
    if adds_start:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{START} $A", special_tokens=[(START, vocab[START])]
        )
    return tokenizer
