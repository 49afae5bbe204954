"""A chat whose template never ends, or needs all memory, fails alone."""

import asyncio
import os
import signal

import pytest
from child_processes import own_children
from http_answers import error_of, post
from listening import serving_with
from scripted_engine import ScriptedEngine
from tokenizers import Tokenizer as Backend

from loong.server.text.chat_template import ChatTemplate
from loong.server.text.tokenizer import Tokenizer

CHAT, COMPLETION, TOKENIZE, RESPONSE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/v1/responses"
SOURCE = """\
{%- for message in messages %}
    {%- if message.content == 'time' %}
        {%- for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}
    {%- elif message.content == 'memory' %}{{ message.content.ljust(10**10) }}
    {%- elif message.content == 'text' %}{% for a in range(99999) %}{{ 'a' * 9999 }}{% endfor %}
    {%- endif %}
    {{- message.content }}
{%- endfor %}"""


def chat(content: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1}


@pytest.fixture
def hostile(tokenizer: Tokenizer) -> Tokenizer:
    assert tokenizer.folder is not None
    backend = Backend.from_file(str(tokenizer.folder / "tokenizer.json"))
    return Tokenizer(backend, chat_template=ChatTemplate(SOURCE, {}))


async def test_others_are_answered_while_a_template_never_ends(hostile: Tokenizer) -> None:
    async with serving_with(hostile)(ScriptedEngine()) as url:
        endless = asyncio.gather(*(error_of(url, CHAT, 400, **chat("time")) for _ in range(3)))
        for body in (chat("hi"), chat("hi, again")):
            assert (await post(url, CHAT, **body)).status_code == 200
        for path, key in ((COMPLETION, "prompt"), (RESPONSE, "input"), (TOKENIZE, "prompt")):
            assert (await post(url, path, **{key: "hi"})).status_code == 200
        assert not endless.done()
        for error in await endless:
            assert error["message"] == (
                "the model's chat template refuses these messages: it takes more than 5 s"
            )
            assert (error["param"], error["code"]) == ("messages", "invalid_value")
        assert (await post(url, CHAT, **chat("hi"))).status_code == 200


async def test_what_takes_memory_or_writes_without_end_fails_alone(hostile: Tokenizer) -> None:
    async with serving_with(hostile)(ScriptedEngine()) as url:
        for content, why in (("memory", "too much memory"), ("text", "writes more than 67108864 characters")):
            answers = await asyncio.gather(
                error_of(url, CHAT, 400, **chat(content)),
                error_of(url, TOKENIZE, 400, messages=chat(content)["messages"]),
                error_of(url, RESPONSE, 400, input=content),
                *(post(url, CHAT, **chat("hi")) for _ in range(10)),
            )
            assert all(why in error["message"] for error in answers[:3])
            assert [answer.status_code for answer in answers[3:]] == [200] * 10


async def test_chats_go_on_when_their_processes_are_killed(hostile: Tokenizer) -> None:
    async with serving_with(hostile)(ScriptedEngine()) as url:
        for _ in range(3):
            assert (await post(url, CHAT, **chat("hi"))).status_code == 200
            for pid in own_children("template_process"):
                os.kill(pid, signal.SIGKILL)
        assert (await post(url, CHAT, **chat("hi"))).status_code == 200
    assert not own_children("template_process")
