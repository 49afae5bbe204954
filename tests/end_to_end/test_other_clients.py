"""Requests of other servers' clients, against the tiny model on two instances."""

import json
import re
from collections.abc import Iterator, Mapping

import httpx
import pytest
from served import Served, served

NAMES = ("--served-model-name", "loong-tiny", "gpt", "--accept-any-model")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("clients"), "--num-instances", "2", *NAMES) as running:
        yield running


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"guided_regex": r"\d{3}-[a-c]{1,4}"}, r"\d{3}-[a-c]{1,4}"),
        ({"guided_choice": ["yes", "no\n", '"']}, 'yes|no\n|"'),
        ({"guided_json": {"enum": [17, "a"]}}, '17|"a"'),
        ({"guided_grammar": 'root ::= "<" [0-9]{2} ">"'}, r"<\d{2}>"),
        ({"guided_grammar": 'start: "<" /[0-9]/ ">"'}, r"<\d>"),
        ({"structured_outputs": {"choice": ["red", "green"]}}, "red|green"),
        ({"structured_outputs": {"regex": "x{5}"}}, "x{5}"),
    ],
)
def test_answers_follow_grammars_in_vllms_notations(
    server: Served, asked: Mapping[str, object], pattern: str
) -> None:
    pytest.importorskip("xgrammar")
    answer = server.client.chat.completions.create(
        model="loong-tiny",
        messages=[{"role": "user", "content": "hi"}],
        n=2,
        extra_body=asked,
    )
    assert all(re.fullmatch(pattern, choice.message.content or "") for choice in answer.choices)
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}


def test_lightllms_endpoints_continue_a_text_as_completions_do(server: Served) -> None:
    completion = server.client.completions.create(
        model="loong-tiny", prompt="hello", max_tokens=9, temperature=0, extra_body={"ignore_eos": True}
    )
    parameters = {"do_sample": False, "ignore_eos": True, "max_new_tokens": 9}
    asked = {"inputs": "hello", "parameters": parameters}
    whole = httpx.post(f"{server.url}/generate", json=asked, timeout=60).json()
    streamed = httpx.post(f"{server.url}/generate_stream", json=asked, timeout=60).text
    events = [json.loads(line.removeprefix("data:")) for line in streamed.split("\n") if line]
    text = completion.choices[0].text
    assert whole["generated_text"] == [text]
    assert "".join(event["token"]["text"] for event in events) == text
    assert len(events) == whole["count_output_tokens"] == 9


def test_any_name_of_a_model_is_answered_and_prompts_are_cut(server: Served) -> None:
    assert [model.id for model in server.client.models.list()] == ["loong-tiny", "gpt"]
    for name in ("gpt", "another"):
        answer = server.client.completions.create(
            model=name, prompt="hello", max_tokens=1, extra_body={"truncate_prompt_tokens": 2}
        )
        assert answer.model == name
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == 2
