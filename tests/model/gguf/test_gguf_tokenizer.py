"""A GGUF file's tokenizer is the one that transformers makes of the same metadata."""

import json
from pathlib import Path
from unicodedata import normalize

import gguf
import pytest
from chat_texts import chat_text
from gguf_files import TEXT, finish, write_tokenizer
from transformers import AutoTokenizer

from loong.core.errors import ConfigError
from loong.model.gguf.folder import tokenizer_folder
from loong.model.gguf.splitting import pre_tokenizer
from loong.server.text.tokenizer import Tokenizer

TEXTS = (TEXT, "a", "", "I'LL pay 12345 €!\r\n\n\tOK   then ", "<|im_end|>mats<s> and <|im_end", "e\u0301")
HI = [{"role": "user", "content": "hi"}]


def new_writer(path: Path) -> gguf.GGUFWriter:
    path.parent.mkdir(exist_ok=True)
    return gguf.GGUFWriter(path, "llama")


def read(path: Path) -> Tokenizer:
    return Tokenizer.from_folder(tokenizer_folder(path, path.parent / "cache"))


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "tekken"])
async def test_byte_level_tokens_are_those_of_transformers(pre: str, tmp_path: Path) -> None:
    writer = new_writer(tmp_path / "a.gguf")
    write_tokenizer(writer, pre, 400)
    writer.add_add_bos_token(False)
    finish(writer)
    tokenizer = read(tmp_path / "a.gguf")
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="a.gguf")
    for text in TEXTS:
        # Qwen2's own tokenizer composes characters first, which transformers does not do for GGUF files.
        composed = normalize("NFC", text) if pre == "qwen2" else text
        wanted = theirs(composed, add_special_tokens=False).input_ids
        token_ids = await tokenizer.encode(text, add_special_tokens=True)
        assert token_ids == wanted, text
        assert tokenizer.decode(token_ids, skip_special_tokens=False) == theirs.decode(wanted)


async def test_smollm_has_a_token_for_every_digit(tmp_path: Path) -> None:
    writer = new_writer(tmp_path / "a.gguf")
    write_tokenizer(writer, "smollm", 400)
    finish(writer)
    tokenizer = read(tmp_path / "a.gguf")
    pieces = [tokenizer.piece(i) for i in await tokenizer.encode("cats 1234", add_special_tokens=True)]
    assert pieces[-5:] == ["Ġ", "1", "2", "3", "4"]


def test_gpt_4o_splits_where_the_case_changes() -> None:
    pieces = [piece for piece, _ in pre_tokenizer("gpt-4o").pre_tokenize_str("I'LL see camelCase 12345/\n")]
    assert pieces == ["I'LL", "Ġsee", "Ġcamel", "Case", "Ġ", "123", "45", "/Ċ"]


def write_sentence_piece(path: Path, **flags: bool) -> dict[str, int]:
    """Write a vocabulary with scores, bytes and special tokens, as Llama 2's; return it."""
    words = ["▁", "t", "h", "e", "c", "a", "▁t", "he", "▁the", "at", "▁c", "▁cat", "s", "1", "2", "ca"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    kind = gguf.TokenType
    types = [kind.UNKNOWN, kind.CONTROL, kind.CONTROL, *[kind.BYTE] * 256, *[kind.NORMAL] * len(words)]
    writer = new_writer(path)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + [-float(rank) for rank in range(len(words))])
    writer.add_token_types(types)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, value in flags.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    finish(writer)
    return {token: token_id for token_id, token in enumerate(tokens)}


async def test_sentence_piece_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    vocab = write_sentence_piece(tmp_path / "a.gguf")
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="a.gguf")
    tokenizer = read(tmp_path / "a.gguf")
    for text in ("the cats", "the  cat\n12é", "catsthe"):
        token_ids = await tokenizer.encode(text, add_special_tokens=True)
        assert token_ids == [vocab["<s>"], *theirs(text, add_special_tokens=False).input_ids], text
        assert tokenizer.decode(token_ids) == text


@pytest.mark.parametrize(("name", "value"), [("add_space_prefix", False), ("add_bos_token", False)])
async def test_a_file_may_turn_first_tokens_and_first_spaces_off(
    name: str, value: bool, tmp_path: Path
) -> None:
    vocab = write_sentence_piece(tmp_path / "a.gguf", **{name: value})
    wanted = ["<s>", "the"] if name == "add_space_prefix" else ["▁the"]
    tokens = [token for part in wanted for token in (["t", "he"] if part == "the" else [part])]
    tokenizer = read(tmp_path / "a.gguf")
    assert await tokenizer.encode("the", add_special_tokens=True) == [vocab[token] for token in tokens]


def test_a_folder_is_made_once_and_has_the_template_and_the_special_tokens(tmp_path: Path) -> None:
    writer = new_writer(tmp_path / "a.gguf")
    write_tokenizer(writer, "gpt-2", 400)
    finish(writer)
    folder = tokenizer_folder(tmp_path / "a.gguf", tmp_path / "cache")
    assert tokenizer_folder(tmp_path / "a.gguf", tmp_path / "cache") == folder
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert (settings["bos_token"], settings["eos_token"]) == ("<s>", "<|im_end|>")
    assert chat_text(Tokenizer.from_folder(folder).chat_template, HI) == "hi<|im_end|>"
    writer = new_writer(tmp_path / "a.gguf")
    write_tokenizer(writer, "qwen2", 400)
    finish(writer)
    assert tokenizer_folder(tmp_path / "a.gguf", tmp_path / "cache") != folder


def test_named_templates_are_kept(tmp_path: Path) -> None:
    writer = new_writer(tmp_path / "a.gguf")
    write_tokenizer(writer, "gpt-2", 400)
    writer.add_string("tokenizer.chat_template.tool_use", "{{ tools }}")
    finish(writer)
    folder = tokenizer_folder(tmp_path / "a.gguf", tmp_path / "cache")
    templates = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    assert [template["name"] for template in templates] == ["default", "tool_use"]


def test_other_tokenizers_are_refused_by_name(tmp_path: Path) -> None:
    for pre, model, said in (
        ("nonsense", "gpt2", r"tokenizer\.ggml\.pre must be one of gpt-2, .*, got 'nonsense'"),
        ("gpt-2", "bert", r"tokenizer\.ggml\.model must be one of gpt2, llama, got 'bert'"),
    ):
        writer = new_writer(tmp_path / "a.gguf")
        write_tokenizer(writer, pre, 400)
        writer.kv_data[0]["tokenizer.ggml.model"].value = model
        finish(writer)
        with pytest.raises(ConfigError, match=said):
            read(tmp_path / "a.gguf")
    writer = new_writer(tmp_path / "b.gguf")
    writer.add_tokenizer_model("llama")
    finish(writer)
    with pytest.raises(ConfigError, match=r"lacks tokenizer\.ggml\.tokens"):
        read(tmp_path / "b.gguf")


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_a_token_of_a_million_letters_is_refused(model: str, tmp_path: Path) -> None:
    writer = new_writer(tmp_path / "a.gguf")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "a" * 1_000_000])
    finish(writer)
    with pytest.raises(ConfigError, match=r"tokens must have at most 1,024 letters each, got 1,000,000"):
        read(tmp_path / "a.gguf")
