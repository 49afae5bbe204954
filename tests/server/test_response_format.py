"""A real process checks schemas here; tests of grammars and workers hold answers to them."""

import gc
import json
import os
import signal
import tracemalloc
from pathlib import Path

import pytest
from broken_packages import broken_package
from child_processes import own_children
from http_answers import error_of, post
from listening import BESIDE_ITS_ENGINE
from openai import AsyncOpenAI
from pydantic import BaseModel
from scripted_engine import ScriptedEngine, Serving

from loong.server.errors import ApiError
from loong.server.grammar_checker import SchemaChecker
from loong.server.tokenizer import Tokenizer

pytest.importorskip("xgrammar")

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


class Person(BaseModel):
    name: str
    age: int | None = None


def as_format(schema: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}


@BESIDE_ITS_ENGINE
async def test_schemas_reach_the_engine_and_bad_ones_are_refused_by_name(serving: Serving) -> None:
    engine = ScriptedEngine()
    bad: dict[str, object] = {"not": {}}
    invalid = {"type": "string", "pattern": "^(?=a)b$"}
    async with serving(engine) as url:
        for wrong, named in ((bad, "not"), (invalid, "Lookahead"), ({"type": "string", "pattern": "("}, "")):
            error = await error_of(url, PATH, 400, messages=MESSAGES, response_format=as_format(wrong))
            assert (error["param"], error["code"]) == ("response_format", "invalid_schema")
            assert named in error["message"]
        for kind in (as_format(SCHEMA), {"type": "json_object"}, {"type": "text"}):
            response = await post(url, PATH, messages=MESSAGES, response_format=kind, max_tokens=4)
            assert response.status_code == 200, response.text
        for name, value in (("ignore_eos", True), ("min_tokens", 1), ("stop_token_ids", [5])):
            body = {"messages": MESSAGES, "response_format": as_format(SCHEMA), name: value}
            assert (await error_of(url, PATH, 400, **body))["param"] == name
    schemas = [request.sampling_params.json_schema for request in engine.requests]
    assert [schema and json.loads(schema) for schema in schemas] == [SCHEMA, {"type": "object"}, None]


async def test_the_official_client_parses_structured_answers(serving: Serving) -> None:
    engine = ScriptedEngine(lambda request: [*b'{"name": "Ada", "age": 36}', 257])
    async with (
        serving(engine) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        answer = await client.chat.completions.parse(
            model="tiny", messages=[{"role": "user", "content": "hi"}], response_format=Person
        )
    assert answer.choices[0].message.parsed == Person(name="Ada", age=36)
    schema = json.loads(engine.requests[0].sampling_params.json_schema or "")
    assert schema["required"] == ["name", "age"]


async def test_a_schema_that_takes_too_long_is_refused_until_it_does_not(tokenizer: Tokenizer) -> None:
    large = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(200)}}
    checker = SchemaChecker(tokenizer.folder, 264, max_seconds=0.001)
    try:
        with pytest.raises(ApiError, match=r"within 0.001 s"):
            await checker.check(json.dumps(large))
        checker.max_seconds = 60
        await checker.check(json.dumps(large))
    finally:
        await checker.close()


async def test_a_schema_is_not_blamed_for_a_process_that_had_ended(tokenizer: Tokenizer) -> None:
    checker = SchemaChecker(tokenizer.folder, 264)
    try:
        await checker.check(json.dumps(SCHEMA))
        (pid,) = own_children("check_process")
        os.kill(pid, signal.SIGKILL)
        await checker.check(json.dumps({"type": "null"}))
    finally:
        await checker.close()


async def test_what_is_known_of_schemas_takes_no_room_for_them(tokenizer: Tokenizer) -> None:
    num_schemas, num_letters = 16, 60_000
    checker = SchemaChecker(tokenizer.folder, 264)
    try:
        await checker.check('{"type":"null"}')
        tracemalloc.start()
        for number in range(num_schemas):
            await checker.check(json.dumps({"const": number, "title": "x" * num_letters}))
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        await checker.close()
    assert held < num_schemas * num_letters / 4


async def test_a_schema_that_no_answer_fits_is_refused_in_few_words(tokenizer: Tokenizer) -> None:
    long_name = {"properties": {"n" * (2**16 - 100): {"type": "nothing"}}}
    checker = SchemaChecker(tokenizer.folder, 264)
    try:
        for schema in (long_name, {"anyOf": [{"$ref": "#"}]}):
            with pytest.raises(ApiError, match=r"which there is not|no answer fits the schema") as refused:
                await checker.check(json.dumps(schema))
            assert len(str(refused.value)) < 2000
        await checker.check(json.dumps({"anyOf": [{"$ref": "#"}, {"type": "null"}]}))
    finally:
        await checker.close()


async def test_without_a_tokenizer_or_with_too_long_a_schema_the_refusal_says_so() -> None:
    with pytest.raises(ApiError, match=r"tokenizer\.json"):
        await SchemaChecker(None, 264).check("{}")
    with pytest.raises(ApiError, match="65536 are the most"):
        await SchemaChecker(Path(), 264).check("{" + " " * 2**16 + "}")


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
    engine = ScriptedEngine()
    async with serving(engine) as url:
        body = {"messages": MESSAGES, "max_tokens": 1}
        for kind in ({"type": "json_object"}, as_format(SCHEMA), as_format(SCHEMA)):
            error = await error_of(url, PATH, 400, **body, response_format=kind)
            assert (error["param"], error["code"]) == ("response_format", "unsupported_parameter")
            assert named in error["message"]
            assert len(error["message"]) < 400
        assert (await post(url, PATH, **body)).status_code == 200
    assert len(engine.requests) == 1
    assert not own_children("check_process")


async def test_a_tokenizer_of_which_no_grammar_can_be_made_is_named_in_the_refusal(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    checker = SchemaChecker(tmp_path, 264)
    with pytest.raises(ApiError, match="no grammar can be made of the model's tokens") as refused:
        await checker.check("{}")
    await checker.close()
    assert refused.value.status == 400
