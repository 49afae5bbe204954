"""The grammars and outputs that workers keep; tests of grammars check what is allowed."""

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from threading import Thread

import pytest
import torch
from child_processes import children_of, with_descendants
from constraints import constraints_of
from served import wait_until
from torch import Tensor

from loong.core.grammar import Grammar, GrammarKind
from loong.core.request import FinishReason
from loong.model.tiny import CONFIG, tiny_model
from loong.worker.sampling.grammar_constraints import AllowedTokens, ConstrainedRow, Constraints

pytest.importorskip("xgrammar")

STOPS = CONFIG.eos_token_ids
MAX_BYTES = 2**18
NUM_SCHEMAS = 25  # whose grammars take more than the bound
AMBIGUOUS = Grammar(GrammarKind.EBNF, 'root ::= "a" S\nS ::= S S S | S S | "x" | ""')  # the work grows fast
LETTERS = Grammar(GrammarKind.REGEX, "[a-z]*")


def as_grammar(content: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(content))


def schema(number: int) -> Grammar:
    return as_grammar({"type": "object", "properties": {f"p{number}": {"type": "string"}}})


def row(request_id: str, grammar: Grammar, output: Sequence[int]) -> ConstrainedRow:
    return ConstrainedRow(request_id, grammar, tuple(output), STOPS)


def tokens(allowed: AllowedTokens) -> list[int]:
    """Return the ids of allowed tokens."""
    bits = (allowed.words.unsqueeze(1) >> torch.arange(32, dtype=torch.int32)) & 1
    return bits.flatten().nonzero().flatten().tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def constraints(folder: Path) -> Constraints:
    return constraints_of(folder, CONFIG.vocab_size)


def test_grammars_take_no_more_than_their_bound_whatever_requests_need(folder: Path) -> None:
    """More schemas by turns than have room: no answer changes."""
    bounded, boundless = (
        constraints_of(folder, CONFIG.vocab_size, num_bytes) for num_bytes in (MAX_BYTES, 2**40)
    )
    output = [*b'{"p']
    for length in (0, 3):
        for number in range(NUM_SCHEMAS):
            asked = [row(f"r{number}", schema(number), output[:length])]
            assert tokens(bounded.allowed(asked)[0]) == tokens(boundless.allowed(asked)[0])
            assert 0 < bounded.num_bytes <= MAX_BYTES
    assert boundless.num_bytes > MAX_BYTES


def test_a_grammar_larger_than_the_bound_is_kept_alone(folder: Path) -> None:
    constraints = constraints_of(folder, CONFIG.vocab_size, max_bytes=1)
    first, second = (constraints.prepare(schema(number)) for number in range(2))
    assert first.result() != second.result()
    assert constraints.prepare(schema(1)) is second
    assert constraints.prepare(schema(0)) is not first


def test_a_grammar_that_cannot_be_made_is_not_kept(constraints: Constraints) -> None:
    for _ in range(2):
        assert constraints.prepare(as_grammar({"not": {}})).exception() is not None
    assert constraints.num_bytes == 0


def test_a_request_that_takes_too_long_fails_alone_and_soon(constraints: Constraints) -> None:
    output = [*b"a"]
    while tokens((hostile := constraints.allowed(both(output)))[0]):
        assert tokens(hostile[1]) == tokens(constraints.allowed(both(output))[1])
        output += b"x"
    assert 20 < len(output) < 500
    failed, other = constraints.allowed(both(output))
    assert failed.why_none is FinishReason.COSTLY
    assert {*b"az", *STOPS} <= {*tokens(other)}


def both(output: Sequence[int]) -> list[ConstrainedRow]:
    """Return a request whose work grows with its output, and another."""
    return [row("hostile", AMBIGUOUS, output), row("other", LETTERS, output)]


def test_an_output_that_takes_too_long_to_repeat_fails_alone(constraints: Constraints) -> None:
    """As after the loss of the instance that had it, where one call takes minutes."""
    others = [row(f"other {number}", LETTERS, b"ab") for number in range(2)]
    before = [tokens(allowed) for allowed in constraints.allowed(others)]
    hostile = row("hostile", AMBIGUOUS, b"a" + b"x" * 1000)
    first, failed, second = constraints.allowed([others[0], hostile, others[1]])
    assert (tokens(failed), failed.why_none) == ([], FinishReason.COSTLY)
    assert [tokens(first), tokens(second)] == before
    continued = constraints.allowed([row("other 0", LETTERS, b"abc")])
    assert [tokens(allowed) for allowed in continued] == before[:1]


def test_a_request_that_begins_anew_after_its_kv_is_gone_depends_on_nothing_before(
    constraints: Constraints,
) -> None:
    """Tokens of a void batch are not those that the request has in the end."""
    grammar = Grammar(GrammarKind.CHOICE, '["abc", "xyz"]')
    assert tokens(constraints.allowed([row("r", grammar, b"ab")])[0]) == [*b"c"]
    constraints.forget("r")
    assert tokens(constraints.allowed([row("r", grammar, b"xyz")])[0]) == [*STOPS]


def test_more_requests_than_fit_one_message_are_all_answered(constraints: Constraints) -> None:
    rows = [row(f"r{number}", LETTERS, b"a" * (number % 3)) for number in range(600)]
    assert all(tokens(allowed) for allowed in constraints.allowed(rows))


def test_ranks_that_find_no_tokens_are_told_those_of_the_first(folder: Path) -> None:
    received: list[Tensor] = []

    def broadcast(tensor: Tensor) -> Tensor:
        received.append(tensor)
        return received[0]

    first = constraints_of(folder, CONFIG.vocab_size, broadcast=broadcast)
    second = Constraints(None, CONFIG.vocab_size, broadcast=broadcast)
    second.prepare(LETTERS).result()
    rows = [
        row("r", LETTERS, b"ab"),
        row("wrong", LETTERS, b"AB"),
        row("costly", AMBIGUOUS, b"a" + b"x" * 999),
    ]
    ours, theirs = first.allowed(rows), second.allowed(rows)
    assert [tokens(allowed) for allowed in ours] == [tokens(allowed) for allowed in theirs]
    reasons = [FinishReason.STUCK, FinishReason.STUCK, FinishReason.COSTLY]
    assert [allowed.why_none for allowed in ours] == [allowed.why_none for allowed in theirs] == reasons
    assert received[1].shape == received[0].shape


def test_grammars_are_compiled_and_requests_forgotten_while_tokens_are_found(
    constraints: Constraints,
) -> None:
    """Grammars may come and go in the middle of outputs, and no output changes."""
    constraints.prepare(LETTERS).result()
    is_over = False

    def compile_others() -> None:
        number = 0
        while not is_over:
            constraints.prepare(schema(number)).result()
            constraints.forget(f"gone {number}")
            number += 1

    thread = Thread(target=compile_others)
    thread.start()
    try:
        for length in range(200):
            output = b"ab" * length
            (allowed,) = constraints.allowed([row("r", LETTERS, output)])
            assert {*b"az", *STOPS} <= {*tokens(allowed)}
    finally:
        is_over = True
        thread.join()


def test_requests_go_on_when_processes_are_killed(folder: Path) -> None:
    """First the spare of the one that finds tokens, then that one, then both. Their root compiles again."""
    others = children_of(os.getpid())
    constraints = constraints_of(folder, CONFIG.vocab_size)
    (root,) = {*children_of(os.getpid())} - {*others}
    before = tokens(constraints.allowed([row("r", LETTERS, b"ab")])[0])

    def processes(number: int) -> list[int]:
        """Return those that are left once those that were replaced have ended."""
        wait_until(lambda: len(with_descendants(root)) == 1 + number, 60, f"{number} processes")
        return with_descendants(root)[1:]

    for number, num_victims in ((2, 1), (1, 1), (2, 2)):
        for pid in processes(number)[-num_victims:]:
            os.kill(pid, signal.SIGKILL)
        assert tokens(constraints.allowed([row("r", LETTERS, b"ab")])[0]) == before
    constraints.prepare(AMBIGUOUS).result()
    assert tokens(constraints.allowed([row("r", LETTERS, b"abc")])[0]) == before
