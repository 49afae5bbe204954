"""Answers of models whose tokens begin with a blank, which decoders drop at the beginning of a text."""

from typing import Any

import pytest
from http_answers import events_of, post
from listening import BESIDE_ITS_ENGINE, serving_with
from scripted_engine import ScriptedEngine, Serving
from sentence_piece import Kind, sentence_piece

from loong.engine.client import EngineLimits
from loong.server.text.chat_template import ChatTemplate
from loong.server.text.tokenizer import Tokenizer

PATH = "/v1/completions"
PROMPT = "My name is"
LIMITS = EngineLimits(2048, 4096, 400)
VOCAB = sentence_piece().get_vocab()
TEMPLATE = ChatTemplate("{% for m in messages %}[{{ m.content }}]{% endfor %}", {})


@pytest.fixture(params=["prepend", "first", "always"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    kind: Kind = request.param
    return Tokenizer(sentence_piece(kind), chat_template=TEMPLATE)


@pytest.fixture
def serving(tokenizer: Tokenizer) -> Serving:
    return serving_with(tokenizer)


def saying(*pieces: str) -> ScriptedEngine:
    """Return an engine whose answers are these pieces of the vocabulary."""
    token_ids = [VOCAB[piece] for piece in pieces]
    return ScriptedEngine(
        lambda request: token_ids,
        LIMITS,
        top_logprobs=lambda token_id: [(token_id, -0.5), (token_ids[0], -1)],
    )


async def texts(url: str, **body: object) -> list[str]:
    """Return the text of each choice, after comparing it with the stream's."""
    whole = (await post(url, PATH, **body)).json()["choices"]
    found = {choice["index"]: "" for choice in whole}
    for event in events_of(await post(url, PATH, stream=True, **body)):
        for choice in event["choices"]:
            found[choice["index"]] += choice["text"]
    assert found == {choice["index"]: choice["text"] for choice in whole}
    return [choice["text"] for choice in whole]


@BESIDE_ITS_ENGINE
async def test_the_prompt_and_the_answer_are_the_text_of_all_tokens(
    serving: Serving, tokenizer: Tokenizer
) -> None:
    async with serving(saying("▁the", "▁", "<0xC3>", "<0xA9>", "</s>", "▁the", "▁▁")) as url:
        for prompt in (PROMPT, f"{PROMPT} ", f"{PROMPT}</s>", "日"):
            token_ids = await tokenizer.encode(prompt, add_special_tokens=True)
            assert await texts(url, prompt=prompt) == [" the é the  "]
            assert await texts(url, prompt=token_ids) == [" the é the  "]
            assert await texts(url, prompt=prompt, echo=True) == [f"{prompt} the é the  "]
            assert await texts(url, prompt=prompt, skip_special_tokens=False) == [" the é</s> the  "]
            assert await texts(url, prompt=[prompt, prompt], n=2) == [" the é the  "] * 4


@BESIDE_ITS_ENGINE
async def test_the_text_of_a_cut_prompt_goes_on_as_well(serving: Serving) -> None:
    async with serving(saying("▁the", "▁the")) as url:
        body = {"prompt": PROMPT, "truncate_prompt_tokens": 1}
        assert await texts(url, **body) == [" the the"]
        assert await texts(url, **body, echo=True) == ["is the the"]


@BESIDE_ITS_ENGINE
async def test_a_prompt_without_text_leaves_the_first_blank_out(
    serving: Serving, tokenizer: Tokenizer
) -> None:
    async with serving(saying("▁the", "▁the")) as url:
        assert await texts(url, prompt="<s>", add_special_tokens=False) == ["the the"]
        assert await texts(url, prompt="<s>", skip_special_tokens=False) == [" the the"]


@BESIDE_ITS_ENGINE
async def test_stop_strings_begin_with_the_first_blank(serving: Serving, tokenizer: Tokenizer) -> None:
    async with serving(saying("▁the", "▁cat", "▁the")) as url:
        assert await texts(url, prompt=PROMPT, stop=" the") == [""]
        assert await texts(url, prompt=PROMPT, stop=" cat") == [" the"]
        assert await texts(url, prompt=PROMPT, stop="e c", echo=True) == [f"{PROMPT} th"]


@BESIDE_ITS_ENGINE
async def test_log_probabilities_name_tokens_with_their_blanks(
    serving: Serving, tokenizer: Tokenizer
) -> None:
    async with serving(saying("▁the", "▁cat", "<0xC3>")) as url:
        body = {"prompt": PROMPT, "logprobs": 2, "echo": True, "prompt_logprobs": 0}
        (choice,) = (await post(url, PATH, **body)).json()["choices"]
        generated = await generate(url)
        chat = await chat_tokens(url)
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["<s>", " My", " name", " is", " the", " cat", "bytes:\\xc3"]
    assert logprobs["text_offset"] == [0, 0, 2, 7, 10, 14, 18]
    assert list(logprobs["top_logprobs"][5]) == [" cat", " the"]
    assert [
        entry["decoded_token"] for position in choice["prompt_logprobs"][1:] for entry in position.values()
    ] == [
        " My",
        " name",
        " is",
    ]
    assert generated == [" the", " cat", "\ufffd"]
    assert [token["token"] for token in chat] == [" the", " cat", "bytes:\\xc3"]
    assert [bytes(token["bytes"]) for token in chat] == [b" the", b" cat", b"\xc3"]


async def generate(url: str) -> list[str]:
    answer = (await post(url, "/generate", inputs=PROMPT, parameters={"return_details": True})).json()
    assert answer["generated_text"] == [" the cat\ufffd"]
    return [token["text"] for token in answer["tokens"]]


async def chat_tokens(url: str) -> list[dict[str, Any]]:
    messages = [{"role": "user", "content": "the"}]
    answer = (await post(url, "/v1/chat/completions", messages=messages, logprobs=True)).json()
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == " the cat\ufffd"
    tokens: list[dict[str, Any]] = choice["logprobs"]["content"]
    return tokens
