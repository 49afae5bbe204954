import hashlib
import itertools
import multiprocessing
from pathlib import Path

import pytest
import torch
from full_attention import FullAttention
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from loong.model.hugging_face import load_config
from loong.model.load import load_model
from loong.model.tensor_parallel import SingleDevice
from loong.model.tiny import CONFIG, SPECIAL_TOKENS, tiny_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def generate(folder: Path, prompt: list[int], num_tokens: int) -> list[int]:
    decoder = load_model(str(folder), "auto", None, 0, SingleDevice())
    attention = FullAttention(decoder.shard)
    tokens, start = list(prompt), 0
    while len(tokens) < len(prompt) + num_tokens:
        positions = torch.arange(start, len(tokens))
        new = attention.begin(len(positions))
        hidden = decoder.forward(torch.tensor(tokens[start:]), positions, positions + 1, new)
        start = len(tokens)
        tokens.append(int(decoder.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]


def test_its_files_say_what_its_config_says(folder: Path) -> None:
    assert load_config(folder) == CONFIG


def test_it_has_the_same_weights_everywhere(folder: Path) -> None:
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert digest == "e33c16817fb2ac7eddf4db4e4f14f0365a41d7166b5213ea5868111582744639"


def has_no_special_token(text: str) -> bool:
    return not any(token in text for token in SPECIAL_TOKENS)


@given(text=st.text().filter(has_no_special_token))
def test_every_text_survives_its_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert token_ids == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_special_tokens_follow_the_bytes(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(256, 264))
    assert tokenizer.encode("a<|user|>b").ids == [256, 97, 261, 98]


def test_transformers_reads_the_folder_and_generates_the_same_tokens(folder: Path) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|bos|><|user|>Hi<|end|><|assistant|>"
    prompt = tokenizer(text, add_special_tokens=False).input_ids
    assert prompt == [256, 261, 72, 105, 259, 262]
    output = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)
    assert generate(folder, prompt, 40) == output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("prompt", ["Hello", "a" * 500, "Once upon a time, there was"])
def test_greedy_output_is_varied_and_printable(folder: Path, tokenizer: Tokenizer, prompt: str) -> None:
    tokens = generate(folder, tokenizer.encode(prompt).ids, 200)
    assert len(set(tokens)) > 20
    assert max(len(list(run)) for _, run in itertools.groupby(tokens)) < 10
    assert tokenizer.decode(tokens).isprintable()


def test_processes_that_race_for_the_folder_all_find_it_whole(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        folders = pool.map(tiny_model, [tmp_path / "new" / "cache"] * 3)
    assert len(set(folders)) == 1
    assert load_config(folders[0]) == CONFIG
    assert [path.name for path in folders[0].parent.iterdir()] == [folders[0].name]
