"""Requests of other servers' clients, against the tiny model on two instances."""

import re
from collections.abc import Iterator, Mapping

import pytest
from served import Served, served


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("clients"), "--num-instances", "2") as running:
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
