"""A real process checks grammars here; tests of grammars and workers hold answers to them."""

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from broken_packages import broken_package
from child_processes import own_children
from http_answers import error_of, post
from listening import BESIDE_ITS_ENGINE, serving_with
from openai import AsyncOpenAI
from pydantic import BaseModel
from scripted_engine import ScriptedEngine, Serving

from loong.core.grammar import Grammar, GrammarKind
from loong.server.text.tokenizer import Tokenizer

pytest.importorskip("xgrammar")

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


class Person(BaseModel):
    name: str
    age: int | None = None


def of_schema(schema: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def as_format(schema: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}


RULES = 'root ::= "a" | "b"'


TAKEN: Sequence[tuple[dict[str, object], Grammar | None]] = (
    ({"guided_json": SCHEMA}, of_schema(SCHEMA)),
    ({"guided_json": json.dumps(SCHEMA)}, of_schema(SCHEMA)),
    ({"guided_regex": r"\d{3}"}, Grammar(GrammarKind.REGEX, r"\d{3}")),
    ({"guided_choice": ["yes", 'n"o']}, Grammar(GrammarKind.CHOICE, r'["yes","n\"o"]')),
    ({"guided_grammar": RULES}, Grammar(GrammarKind.EBNF, RULES)),
    ({"guided_grammar": 'start: "a"'}, Grammar(GrammarKind.LARK, 'start: "a"')),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": False}}, of_schema(SCHEMA)),
    ({"structured_outputs": {"regex": "a+", "json": None}}, Grammar(GrammarKind.REGEX, "a+")),
    ({"structured_outputs": {"choice": ["yes"]}}, Grammar(GrammarKind.CHOICE, '["yes"]')),
    ({"structured_outputs": {"grammar": RULES}}, Grammar(GrammarKind.EBNF, RULES)),
    ({"structured_outputs": {"json_object": True}}, of_schema({"type": "object"})),
    ({"guided_regex": None, "response_format": {"type": "text"}}, None),
)
REFUSED: Sequence[tuple[str, object, str]] = (
    ("guided_json", "{", "JSON"),
    ("guided_json", "[]", "must be an object, but is"),
    ("guided_json", 5, "must be an object, but is"),
    ("guided_json", {"not": {}}, "has not"),
    ("guided_regex", "", "1 character"),
    ("guided_regex", "(", "parenthesis"),
    ("guided_regex", "a(?=b)", "Lookahead"),
    ("guided_regex", "a$b", "'$' should be at the end"),
    ("guided_regex", "(a{100}){100}", "10000 times"),
    ("guided_choice", [], "at least 1"),
    ("guided_choice", "yes", "list"),
    ("guided_choice", [1], "guided_choice.0"),
    ("guided_choice", ["a"] * 1025, "1024"),
    ("guided_grammar", "answer ::= 1", "root"),
    ("guided_grammar", "start: nothing", "nothing"),
    ("guided_grammar", "root ::= root", "no answer fits the rules"),
    ("guided_grammar", 'root ::= root root root | "a" | ""', "takes more than"),
    ("structured_outputs", {}, "one of json, regex, choice, grammar and json_object"),
    ("structured_outputs", {"regex": "a", "choice": ["b"]}, "choice cannot be used with regex"),
    ("structured_outputs", {"structural_tag": "{}"}, "structured_outputs.structural_tag"),
    ("structured_outputs", {"disable_any_whitespace": True}, "disable_any_whitespace"),
    ("structured_outputs", {"regex": "("}, "parenthesis"),
)


@dataclass(frozen=True)
class Running:
    """A server that is up, and its engine, which answers all alike."""

    url: str
    engine: ScriptedEngine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tokenizer: Tokenizer) -> AsyncIterator[Running]:
    engine = ScriptedEngine(lambda request: [*b'{"name": "Ada", "age": 36}', 257])
    async with serving_with(tokenizer)(engine) as url:
        yield Running(url, engine)


IN_ITS_LOOP = pytest.mark.asyncio(loop_scope="module")


@IN_ITS_LOOP
async def test_grammars_in_vllms_notations_reach_the_engine(server: Running) -> None:
    num_before = len(server.engine.requests)
    for asked, _ in TAKEN:
        response = await post(server.url, PATH, messages=MESSAGES, **asked, max_tokens=4)
        assert response.status_code == 200, response.text
    response = await post(server.url, "/v1/completions", prompt="a", guided_choice=["b"])
    assert response.status_code == 200, response.text
    *found, last = [request.sampling_params.grammar for request in server.engine.requests[num_before:]]
    assert [grammar and parsed(grammar) for grammar in found] == [
        grammar and parsed(grammar) for _, grammar in TAKEN
    ]
    assert last == Grammar(GrammarKind.CHOICE, '["b"]')


def parsed(grammar: Grammar) -> tuple[GrammarKind, object]:
    """Its source, where this is JSON as a value."""
    is_schema = grammar.kind is GrammarKind.JSON_SCHEMA
    return grammar.kind, json.loads(grammar.text) if is_schema else grammar.text


@IN_ITS_LOOP
async def test_grammars_that_cannot_be_kept_to_are_refused_by_name(server: Running) -> None:
    for field, value, why in REFUSED:
        error = await error_of(server.url, PATH, 400, **{"messages": MESSAGES, field: value})
        assert error["param"] == field
        assert error["message"].startswith(field)
        assert why in error["message"]


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"guided_regex": "a", "guided_choice": ["b"]}, ("guided_choice", "guided_regex")),
        ({"guided_json": {}, "response_format": {"type": "json_object"}}, ("guided_json", "response_format")),
        (
            {"guided_grammar": RULES, "structured_outputs": {"regex": "a"}},
            ("guided_grammar", "structured_outputs"),
        ),
        ({"guided_regex": "a", "ignore_eos": True}, ("ignore_eos", "guided_regex")),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 1}, ("min_tokens", "structured_outputs")),
    ],
)
async def test_fields_that_conflict_are_both_named(
    serving: Serving, asked: dict[str, object], named: tuple[str, str]
) -> None:
    async with serving(ScriptedEngine()) as url:
        error = await error_of(url, PATH, 400, messages=MESSAGES, **asked)
    assert error["param"] == named[0]
    assert all(name in error["message"] for name in named)


@IN_ITS_LOOP
async def test_schemas_reach_the_engine_and_bad_ones_are_refused(server: Running) -> None:
    num_before, url = len(server.engine.requests), server.url
    bad: dict[str, object] = {"not": {}}
    invalid = {"type": "string", "pattern": "^(?=a)b$"}
    for wrong, named in ((bad, "not"), (invalid, "lookahead"), ({"type": "string", "pattern": "("}, "")):
        error = await error_of(url, PATH, 400, messages=MESSAGES, response_format=as_format(wrong))
        assert (error["param"], error["code"]) == ("response_format", "invalid_schema")
        assert named in error["message"]
    for kind in (as_format(SCHEMA), {"type": "json_object"}, {"type": "text"}):
        response = await post(url, PATH, messages=MESSAGES, response_format=kind, max_tokens=4)
        assert response.status_code == 200, response.text
    for name, value in (("ignore_eos", True), ("min_tokens", 1), ("stop_token_ids", [5])):
        body = {"messages": MESSAGES, "response_format": as_format(SCHEMA), name: value}
        assert (await error_of(url, PATH, 400, **body))["param"] == name
    grammars = [request.sampling_params.grammar for request in server.engine.requests[num_before:]]
    assert [grammar and json.loads(grammar.text) for grammar in grammars] == [
        SCHEMA,
        {"type": "object"},
        None,
    ]


@IN_ITS_LOOP
async def test_the_official_client_parses_structured_answers(server: Running) -> None:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.parse(
            model="tiny", messages=[{"role": "user", "content": "hi"}], response_format=Person
        )
    assert answer.choices[0].message.parsed == Person(name="Ada", age=36)
    grammar = server.engine.requests[-1].sampling_params.grammar
    assert grammar is not None
    schema = json.loads(grammar.text)
    assert schema["required"] == ["name", "age"]


@pytest.mark.parametrize(
    ("code", "named"),
    [
        (
            "raise ModuleNotFoundError(\"No module named 'xgrammar'\", name='xgrammar')",
            "pip install xgrammar",
        ),
        ("raise ModuleNotFoundError(\"No module named 'tvm_ffi'\", name='tvm_ffi')", "'tvm_ffi'"),
        ("raise ImportError('undefined symbol')", "ImportError: undefined symbol"),
        ("raise OSError('libcudart.so.13: cannot open')", "OSError: libcudart.so.13: cannot open"),
        ("raise RuntimeError('x' * 10_000)", "RuntimeError: xxx"),
        ("", "cannot import name"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "ended with code"),
        ("raise SystemExit(3)", "ended with code"),
    ],
)
@BESIDE_ITS_ENGINE
async def test_an_xgrammar_that_cannot_be_imported_is_named_in_the_refusal(
    serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, named: str
) -> None:
    for name, value in broken_package(tmp_path, "xgrammar", code).items():
        monkeypatch.setenv(name, value)  # for the process that checks schemas
    engine, before = ScriptedEngine(), own_children("check_process")
    async with serving(engine) as url:
        body = {"messages": MESSAGES, "max_tokens": 1}
        for kind in ({"type": "json_object"}, as_format(SCHEMA), as_format(SCHEMA)):
            error = await error_of(url, PATH, 400, **body, response_format=kind)
            assert (error["param"], error["code"]) == ("response_format", "unsupported_parameter")
            assert named in error["message"]
            assert len(error["message"]) < 400
        assert (await post(url, PATH, **body)).status_code == 200
    assert len(engine.requests) == 1
    assert own_children("check_process") == before
