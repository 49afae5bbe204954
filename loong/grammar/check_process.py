"""A process that compiles grammars on trial, so that a costly grammar can only end this process.

A request is a grammar as JSON. The answer is empty on success, else the error.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import IO

import msgspec

from loong.core.errors import InvalidRequestError
from loong.core.grammar import Grammar, GrammarKind
from loong.grammar.availability import import_failure
from loong.grammar.compiler import GrammarCompiler, allows_anything
from loong.processes.bounded_process import CannotAnswerError, answer_requests

MAX_GRAMMAR_BYTES = 2**24  # workers keep dozens of grammars
_MAX_ANSWER = 1000  # characters: names in a grammar may be long
_WARNING = "Warning: "
_NAMES: Mapping[GrammarKind, str] = {  # names of the kinds in messages
    GrammarKind.JSON_SCHEMA: "the schema",
    GrammarKind.REGEX: "the regular expression",
    GrammarKind.CHOICE: "the choices",
    GrammarKind.EBNF: "the rules",
    GrammarKind.LARK: "the rules",
    GrammarKind.STRUCTURAL_TAG: "the schemas of the tools",
}


def main() -> None:
    """Answer requests until standard input ends.

    Arguments: a model folder, and the size of its vocabulary.
    """
    folder, vocab_size = sys.argv[1:]
    answer_requests(partial(_prepare, Path(folder), int(vocab_size)))


def _prepare(folder: Path, vocab_size: int) -> Callable[[bytes], bytes]:
    warnings = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  open until the process ends
    for stream in (sys.stdout, sys.stderr):
        os.dup2(warnings.fileno(), stream.fileno())
    try:
        compiler = GrammarCompiler(folder, vocab_size)
        compiler.read_ahead()  # so that it takes no time from the first grammar that needs it
    except Exception as error:  # xgrammar's import, and tokenizers, may raise anything
        why = import_failure() or f"no grammar can be made of the model's tokens: {error}"
        raise CannotAnswerError(_cut(why)) from error
    return partial(_answer, compiler, vocab_size, warnings)


def _answer(compiler: GrammarCompiler, vocab_size: int, warnings: IO[bytes], request: bytes) -> bytes:
    warnings.truncate(0)
    warnings.seek(0)
    grammar = msgspec.json.decode(request, type=Grammar)
    why = _try(compiler, grammar, vocab_size)
    if not why:
        warnings.seek(0)
        why = _reported(grammar, warnings.read(4096).decode(errors="replace"))
    return _cut(why).encode()


def _try(compiler: GrammarCompiler, grammar: Grammar, vocab_size: int) -> str:
    """Return the reason why a grammar is not supported, or an empty string."""
    name = _NAMES[grammar.kind]
    try:
        compiled = compiler.compile(grammar)
        num_bytes, is_possible = compiled.memory_size_bytes, allows_anything(compiled, vocab_size)
    except InvalidRequestError as error:
        return str(error)
    except (RuntimeError, MemoryError, msgspec.DecodeError) as error:
        lines = str(error).strip().splitlines()
        line = 0 if grammar.kind is GrammarKind.LARK else -1  # the others show the place
        reason = lines[line].rsplit(": ", 1)[-1] if lines else type(error).__name__
        return f"no grammar can be made of {name}: {reason}"
    if num_bytes > MAX_GRAMMAR_BYTES:
        most = f"at most {MAX_GRAMMAR_BYTES} are allowed"
        return f"the grammar of {name} takes {num_bytes} bytes, and {most}"
    return "" if is_possible else f"no answer fits {name}"


def _cut(why: str) -> str:
    return why if len(why) <= _MAX_ANSWER else f"{why[:_MAX_ANSWER]} ..."


def _reported(grammar: Grammar, warnings: str) -> str:
    """Return the parts that the compiler left out of the grammar, from its warnings."""
    if _WARNING not in warnings:
        return ""
    what = warnings.split(_WARNING, 1)[1].splitlines()[0]
    return f"{_NAMES[grammar.kind]} cannot be kept to: {what}"


if __name__ == "__main__":
    main()
