"""A process that compiles grammars on trial, so that a costly grammar can only end this process.

It reads one grammar a line as JSON, and answers with a JSON string: empty on success, else the error. It
first answers whether it can compile any grammar: an empty string, or the error before it ends.
"""

import os
import resource
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from loong.core.errors import InvalidRequestError
from loong.core.grammar import Grammar, GrammarKind
from loong.grammar.availability import import_failure
from loong.grammar.compiler import GrammarCompiler, allows_anything

MAX_GRAMMAR_BYTES = 2**24  # workers keep dozens of grammars
_MAX_EXTRA_MEMORY = 2**29  # bytes
_MAX_SECONDS = 60  # for one grammar, if the parent is gone
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
    """Answer lines of standard input until it ends.

    Arguments: a model folder, and the size of its vocabulary.
    """
    folder, vocab_size = sys.argv[1:]
    answers = os.dup(sys.stdout.fileno())  # other output of this process is not an answer
    with tempfile.TemporaryFile() as warnings:
        os.dup2(warnings.fileno(), sys.stderr.fileno())
        os.dup2(warnings.fileno(), sys.stdout.fileno())
        signal.alarm(_MAX_SECONDS)
        try:
            compiler = GrammarCompiler(Path(folder), int(vocab_size))
        except Exception as error:  # noqa: BLE001  xgrammar's import, and tokenizers, may raise anything
            why = import_failure() or f"no grammar can be made of the model's tokens: {error}"
            os.write(answers, msgspec.json.encode(_cut(why)) + b"\n")
            return
        _limit_memory()
        signal.alarm(0)
        os.write(answers, b'""\n')  # ready
        for line in sys.stdin.buffer:
            os.ftruncate(warnings.fileno(), 0)
            os.lseek(warnings.fileno(), 0, os.SEEK_SET)
            signal.alarm(_MAX_SECONDS)
            grammar = msgspec.json.decode(line, type=Grammar)
            why = _try(compiler, grammar, int(vocab_size))
            signal.alarm(0)
            if not why:
                os.lseek(warnings.fileno(), 0, os.SEEK_SET)
                why = _reported(grammar, os.read(warnings.fileno(), 4096).decode(errors="replace"))
            os.write(answers, msgspec.json.encode(_cut(why)) + b"\n")


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


def _limit_memory() -> None:
    """Limit the memory that this process may allocate from now on."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + _MAX_EXTRA_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main()
