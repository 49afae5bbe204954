import asyncio
import json
import resource
import threading
from pathlib import Path

import pytest
from chat_texts import chat_text
from sentence_piece import Kind, sentence_piece
from tokenizers import Regex, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from loong.core.errors import ConfigError, InvalidRequestError
from loong.server.text.tokenizer import Tokenizer

VOCAB = {"<s>": 0, "</s>": 1, "a": 2, "b": 3, "<0xE9>": 4}
HI = [{"role": "user", "content": "hi"}]


def _write(folder: Path, *, adds_bos: bool = False, truncates: bool = False, **files: object) -> Path:
    backend = Backend(models.WordLevel(VOCAB, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<s>", "</s>"])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    if truncates:
        backend.enable_truncation(2)
        backend.enable_padding(length=8)
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("adds_bos", [True, False])
async def test_the_tokenizers_own_file_says_how_a_text_begins(tmp_path: Path, adds_bos: bool) -> None:
    config = {"bos_token": {"content": "<s>"}, "add_bos_token": not adds_bos}
    tokenizer = Tokenizer.from_folder(_write(tmp_path, adds_bos=adds_bos, tokenizer_config=config))
    assert await tokenizer.encode("a b", add_special_tokens=True) == [*([0] if adds_bos else []), 2, 3]
    assert await tokenizer.encode("a b", add_special_tokens=False) == [2, 3]


def test_special_tokens_may_be_named_in_a_file_of_their_own(tmp_path: Path) -> None:
    special: dict[str, object] = {"bos_token": "<s>", "eos_token": {"content": "b"}, "image_token": "<img>"}
    config: dict[str, object] = {
        "chat_template": "{{ bos_token }}{{ image_token }}{{ turn_token }}{{ eos_token }}",
        "extra_special_tokens": {"turn_token": "<turn>"},
    }
    _write(tmp_path, tokenizer_config=config, special_tokens_map=special)
    tokenizer = Tokenizer.from_folder(tmp_path, (1,))
    assert tokenizer.eos_token_ids == (1, 3)
    assert chat_text(tokenizer.chat_template, HI) == "<s><img><turn>b"
    assert tokenizer.decode([2, 3, 5, 2]) == "a a"
    assert tokenizer.special_token_ids(["<img>", "<turn>", "b"]) == {3, 5, 6}


async def test_few_long_texts_are_encoded_at_a_time(tmp_path: Path) -> None:
    """Each takes memory that the process keeps, however many clients send one."""
    tokenizer, before = Tokenizer.from_folder(_write(tmp_path)), threading.active_count()
    texts = [f"{'a b ' * 5000}{'b ' * number}" for number in range(16)]
    found = await asyncio.gather(*(tokenizer.encode(text, add_special_tokens=False) for text in texts))
    assert [len(token_ids) for token_ids in found] == [10_000 + number for number in range(16)]
    assert threading.active_count() <= before + 2


async def test_a_long_text_does_not_wait_for_huge_ones(tmp_path: Path) -> None:
    tokenizer, huge = Tokenizer.from_folder(_write(tmp_path)), "a b " * 150_000
    async with asyncio.TaskGroup() as group:
        others = [group.create_task(tokenizer.encode(huge, add_special_tokens=False)) for _ in range(4)]
        await asyncio.sleep(0)
        assert len(await tokenizer.encode("a b " * 5000, add_special_tokens=False)) == 10_000
        assert not all(other.done() for other in others)


async def test_the_memory_of_a_huge_text_is_given_back(tmp_path: Path) -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    tokenizer, before = Tokenizer.from_folder(_write(tmp_path)), resident_bytes()
    assert len(await tokenizer.encode("a b " * 500_000, add_special_tokens=False)) == 1_000_000
    assert resident_bytes() < before + 2**25  # while it is encoded, it takes four times as much


async def test_nothing_is_cut_or_padded(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(_write(tmp_path, truncates=True))
    assert await tokenizer.encode("a b a b", add_special_tokens=True) == [2, 3, 2, 3]
    assert await tokenizer.encode("a", add_special_tokens=True) == [2]


@pytest.mark.parametrize(
    ("config", "of_the_model", "eos_token_ids"),
    [
        ({}, (), ()),
        ({"eos_token": "</s>"}, (), (1,)),
        ({}, (3, 2), (2, 3)),
        ({"eos_token": "</s>"}, (1, 3), (1, 3)),
    ],
)
def test_the_model_and_its_tokenizer_both_say_what_ends_a_sequence(
    tmp_path: Path, config: dict[str, object], of_the_model: tuple[int, ...], eos_token_ids: tuple[int, ...]
) -> None:
    tokenizer = Tokenizer.from_folder(_write(tmp_path, tokenizer_config=config), of_the_model)
    assert tokenizer.eos_token_ids == eos_token_ids


def test_a_template_comes_from_its_own_file_first(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ eos_token }}"}]
    _write(tmp_path, tokenizer_config={"chat_template": named, "eos_token": "</s>"})
    assert chat_text(Tokenizer.from_folder(tmp_path).chat_template, HI) == "</s>"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert chat_text(Tokenizer.from_folder(tmp_path).chat_template, HI) == "file"


def test_a_fallback_byte_is_known_by_its_name(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(_write(tmp_path))
    assert [tokenizer.is_fallback_byte(i) for i in (2, 4, 99)] == [False, True, False]
    assert tokenizer.token_bytes(4) == b"\xe9"


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer.json does not exist"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer.json is not a tokenizer"):
        Tokenizer.from_folder(tmp_path)
    (_write(tmp_path) / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config.json is damaged"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("kind", ["prepend", "first", "always"])
async def test_the_pieces_of_a_text_are_encoded_without_new_blanks(kind: Kind) -> None:
    tokenizer = Tokenizer(sentence_piece(kind))
    pieces = [("My ", False), ("<s>", True), ("the", False), ("</s>", True), (" cat</s>", False)]
    token_ids = await tokenizer.encode_pieces(pieces, add_special_tokens=True)
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == "<s> My <s>the</s> cat</s>"
    assert [i for i in token_ids if i < 3] == [1, 2]


@pytest.mark.parametrize("length", [40, 10_000])
async def test_a_text_on_which_a_pattern_backtracks_too_long_is_refused(length: int) -> None:
    backend = Backend(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("(a|aa)+$"), "isolated")
    tokenizer = Tokenizer(backend)
    assert await tokenizer.encode("aab", add_special_tokens=True) == [0, 0, 1]
    with pytest.raises(InvalidRequestError, match=r"tokenizer cannot encode this text: .* retry-limit"):
        await tokenizer.encode("a" * length + "b", add_special_tokens=True)
    with pytest.raises(InvalidRequestError, match="tokenizer cannot encode this text"):
        await tokenizer.encode_pieces([("a" * length + "b", True), ("a", False)], add_special_tokens=False)
