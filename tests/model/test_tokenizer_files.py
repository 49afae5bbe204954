"""The tokenizer of a folder is the one that transformers makes of the same files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from sentence_piece import sentence_piece
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from loong.core.errors import ConfigError
from loong.model.gguf.splitting import pre_tokenizer
from loong.model.tokenizer_files import read_tokenizer

TEXTS = (
    "My name is the cat",
    "My<s>the cat</s> the<unk>",
    "<|im_start|>My<|im_end|> the<img>",
    "  the\n cat",
    "<s>[INST] My [/INST]the</s><s>[INST]",
    "",
)
Files = Mapping[str, Mapping[str, Any]]
IM = ("<|im_start|>", "<|im_end|>")


def described(token: str, **properties: object) -> dict[str, object]:
    return {
        "content": token,
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        **properties,
    }


def byte_level() -> Tokenizer:
    """Return a byte-level tokenizer without added tokens, whose vocabulary has some as plain tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, "<s>", "</s>", *IM])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def write(folder: Path, tokenizer: Tokenizer, files: Files, model_type: str = "llama") -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in {"config": {"model_type": model_type}, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def check_equal(folder: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = read_tokenizer(folder)
    assert ours.special_tokens == theirs.special_tokens_map
    for text in TEXTS:
        wanted = theirs(text).input_ids
        assert ours.tokenizer.encode(text).ids == wanted, text
        for skip in (True, False):
            shown = theirs.decode(wanted, skip_special_tokens=skip)
            assert ours.tokenizer.decode(wanted, skip_special_tokens=skip) == shown


NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
SPECIAL: dict[str, Files] = {
    "none": {},
    "named in the settings": {"tokenizer_config": {**NAMED, "pad_token": "<pad>"}},
    "named as objects": {
        "tokenizer_config": {"eos_token": {"__type": "AddedToken", **described("</s>", lstrip=True)}}
    },
    "in the map alone": {"special_tokens_map": NAMED},
    "in the map as objects": {
        "tokenizer_config": {"eos_token": "<|im_end|>"},
        "special_tokens_map": {"bos_token": described("<s>"), "eos_token": described("</s>", rstrip=True)},
    },
    "more of them in the map": {
        "tokenizer_config": NAMED,
        "special_tokens_map": {"additional_special_tokens": [*IM]},
    },
    "more of them in the settings": {
        "tokenizer_config": {"eos_token": IM[1], "additional_special_tokens": [*IM]},
    },
    "more of them by names": {
        "tokenizer_config": {
            **NAMED,
            "extra_special_tokens": {"image_token": "<img>", "turn_token": IM[0]},
            "additional_special_tokens": [IM[1]],
        }
    },
    "named as no others are": {"tokenizer_config": {**NAMED, "image_token": "<img>"}},
    "a whole list": {
        "tokenizer_config": {
            **NAMED,
            "added_tokens_decoder": {
                "300": described(IM[0], special=True),
                "301": described(IM[1], special=True),
                "9": described("My", special=False, normalized=True),
                "1": described("<s>", special=True),
                "2": described("</s>", special=False, lstrip=True),
            },
        },
        "special_tokens_map": {"eos_token": IM[1]},
        "added_tokens": {"<img>": 400},
    },
    "a list of added tokens": {
        "tokenizer_config": {"eos_token": IM[1]},
        "special_tokens_map": {"additional_special_tokens": ["<img>"]},
        "added_tokens": {IM[1]: 401, "<img>": 402, "My name": 403, IM[0]: 400},
    },
}


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("cls", ["PreTrainedTokenizerFast", "LlamaTokenizer", None])
def test_special_tokens_are_those_of_transformers(name: str, cls: str | None, tmp_path: Path) -> None:
    for number, tokenizer in enumerate((sentence_piece(), byte_level())):
        folder = tmp_path / str(number)
        folder.mkdir()
        settings = {**SPECIAL[name].get("tokenizer_config", {}), "tokenizer_class": cls}
        check_equal(write(folder, tokenizer, {**SPECIAL[name], "tokenizer_config": settings}))


@pytest.mark.parametrize("cls", ["LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast", None])
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen3"])
@pytest.mark.parametrize("options", [{}, {"legacy": True}, {"legacy": False}, {"add_prefix_space": False}])
def test_blanks_after_special_tokens_are_those_of_transformers(
    cls: str | None, model_type: str, options: dict[str, object], tmp_path: Path
) -> None:
    if (cls, model_type) == (None, "qwen3"):
        model_type = "llama"  # Qwen's own class has no such vocabulary
    for kind in ("prepend", "first", "always"):
        folder = tmp_path / kind
        folder.mkdir()
        files = {"tokenizer_config": {**NAMED, "tokenizer_class": cls, **options}}
        check_equal(write(folder, sentence_piece(kind), files, model_type))


@pytest.mark.parametrize("settings", [{}, {"eos_token": IM[1], "tokenizer_class": "LlamaTokenizerFast"}])
def test_tokenizers_of_qwen_name_a_token_by_themselves(settings: dict[str, object], tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizer("qwen2")
    check_equal(write(tmp_path, tokenizer, {"tokenizer_config": settings}, "qwen2"))


def test_a_class_may_be_named_by_the_models_config(tmp_path: Path) -> None:
    files = {"config": {"model_type": "llama", "tokenizer_class": "LlamaTokenizer"}}
    check_equal(write(tmp_path, sentence_piece(), files))


@pytest.mark.parametrize("cls", ["LlamaTokenizer", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("is_added", [True, False])
@pytest.mark.parametrize("is_asked", [True, False])
def test_the_file_alone_says_which_tokens_begin_and_end_a_text(
    cls: str, is_added: bool, is_asked: bool, tmp_path: Path
) -> None:
    settings = {**NAMED, "tokenizer_class": cls, "add_bos_token": is_asked, "add_eos_token": is_asked}
    folder = write(tmp_path, sentence_piece(adds_start=is_added), {"tokenizer_config": settings})
    check_equal(folder)
    assert read_tokenizer(folder).tokenizer.encode("the").tokens[:1] == ["<s>" if is_added else "▁the"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "tokenizer_config",
            {"added_tokens_decoder": {"a": "b"}},
            "special tokens of its tokenizer are damaged",
        ),
        ("tokenizer_config", {"eos_token": {"content": 3}}, "special tokens of its tokenizer are damaged"),
        ("added_tokens", {"a": "b"}, "added_tokens.json is damaged"),
        ("special_tokens_map", [], "special_tokens_map.json is damaged"),
    ],
)
def test_damaged_files_are_named(name: str, content: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        read_tokenizer(write(tmp_path, sentence_piece(), {name: content}))
