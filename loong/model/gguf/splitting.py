"""The pre-tokenizers of byte-level vocabularies, by their names in llama.cpp.

Source: the `tokenizer.json` of the models with these names.
"""

from collections.abc import Callable
from typing import Final

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA_3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN_2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_LOWER, _UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_WORD_START = r"[^\r\n\p{L}\p{N}]?"
_GPT_4O = (
    rf"{_WORD_START}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_WORD_START}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _by_pattern(pattern: str) -> PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _gpt_2() -> PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _smollm() -> PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt_2()])


_PRE_TOKENIZERS: Final[dict[str, Callable[[], PreTokenizer]]] = {
    "gpt-2": _gpt_2,
    "default": _gpt_2,
    "smollm": _smollm,
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), lambda: _by_pattern(_LLAMA_3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), lambda: _by_pattern(_QWEN_2)),
    "tekken": lambda: _by_pattern(_TEKKEN),
    "gpt-4o": lambda: _by_pattern(_GPT_4O),
}
PRE_TOKENIZER_NAMES = tuple(_PRE_TOKENIZERS)
ADDING_BOS: Final = ("llama-bpe", "llama3", "llama-v3", "tekken")  # unless the file says otherwise
WHOLE_WORDS: Final = (*ADDING_BOS, "gpt-4o")  # words of the vocabulary are not split


def pre_tokenizer(name: str) -> PreTokenizer:
    """Return the pre-tokenizer `name` of PRE_TOKENIZER_NAMES."""
    return _PRE_TOKENIZERS[name]()


def normalizer(name: str) -> Normalizer | None:
    """Return the normalizer of the pre-tokenizer `name`, or None."""
    return normalizers.NFC() if name == "qwen2" else None
