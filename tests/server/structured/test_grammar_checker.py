"""A process checks whether grammars can be compiled, before workers do."""

import asyncio
import gc
import json
import os
import signal
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from child_processes import own_children
from new_garbage import only_new_garbage

from loong.core.grammar import Grammar, GrammarKind
from loong.server.api.errors import ApiError
from loong.server.structured.grammar_checker import GrammarChecker
from loong.server.text.tokenizer import Tokenizer

pytest.importorskip("xgrammar")

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
IN_ITS_LOOP = pytest.mark.asyncio(loop_scope="module")


def of_schema(schema: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def checker(tokenizer: Tokenizer) -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker(tokenizer.folder, 264)
    yield checker
    await checker.close()


@IN_ITS_LOOP
async def test_a_schema_that_takes_too_long_is_refused_until_it_does_not(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(200)}}
    monkeypatch.setattr(checker, "max_seconds", 0.001)
    with pytest.raises(ApiError, match=r"takes more than 0.001 s"):
        await checker.check(of_schema(large), "response_format")
    monkeypatch.undo()
    await checker.check(of_schema(large), "response_format")


@IN_ITS_LOOP
async def test_a_schema_is_not_blamed_for_a_process_that_had_ended(checker: GrammarChecker) -> None:
    await checker.check(of_schema(SCHEMA), "response_format")
    (pid,) = own_children("check_process")
    os.kill(pid, signal.SIGKILL)
    await checker.check(of_schema({"type": "null"}), "response_format")


@IN_ITS_LOOP
async def test_what_is_known_of_schemas_takes_no_room_for_them(checker: GrammarChecker) -> None:
    num_schemas, num_letters = 16, 60_000
    await checker.check(of_schema({"type": "boolean"}), "response_format")
    try:
        with only_new_garbage():
            tracemalloc.start()
            for number in range(num_schemas):
                await checker.check(of_schema({"const": number, "title": "x" * num_letters}), "a")
            gc.collect()
            held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < num_schemas * num_letters / 4


@IN_ITS_LOOP
async def test_a_schema_that_no_answer_fits_is_refused_in_few_words(checker: GrammarChecker) -> None:
    long_name = {"properties": {"n" * (2**16 - 100): {"type": "nothing"}}}
    for schema in (long_name, {"anyOf": [{"$ref": "#"}]}):
        with pytest.raises(ApiError, match=r"which does not exist|no answer fits the schema") as refused:
            await checker.check(of_schema(schema), "a")
        assert len(str(refused.value)) < 2000
    await checker.check(of_schema({"anyOf": [{"$ref": "#"}, {"type": "null"}]}), "a")


async def test_without_a_tokenizer_or_with_too_long_a_schema_the_refusal_says_so() -> None:
    with pytest.raises(ApiError, match=r"tokenizer\.json"):
        await GrammarChecker(None, 264).check(of_schema({}), "a")
    with pytest.raises(ApiError, match="at most 65536 are allowed"):
        await GrammarChecker(Path(), 264).check(Grammar(GrammarKind.REGEX, "a" * 2**16), "a")


async def test_a_tokenizer_of_which_no_grammar_can_be_made_is_named_in_the_refusal(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    checker = GrammarChecker(tmp_path, 264)
    with pytest.raises(ApiError, match="no grammar can be made of the model's tokens") as refused:
        await checker.check(of_schema({}), "a")
    await checker.close()
    assert refused.value.status == 400


async def test_a_process_that_starts_ahead_checks_the_first_grammar(tokenizer: Tokenizer) -> None:
    before = own_children("check_process")
    checker = GrammarChecker(tokenizer.folder, 264)
    checker.start_ahead()
    await checker.check(of_schema(SCHEMA), "a")
    (pid,) = {*own_children("check_process")} - {*before}
    await checker.check(Grammar(GrammarKind.REGEX, "[a-c]"), "a")
    assert pid in own_children("check_process")
    await checker.close()
    assert own_children("check_process") == before


async def test_a_start_ahead_is_over_with_its_checker(tokenizer: Tokenizer) -> None:
    before = own_children("check_process")
    for checker in (GrammarChecker(tokenizer.folder, 264), GrammarChecker(None, 264)):
        checker.start_ahead()
        await asyncio.sleep(0)
        await checker.close()
    assert own_children("check_process") == before
