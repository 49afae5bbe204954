"""A process that tries schemas, so that a schema that takes for ever, or all memory, takes only this process.

It reads one JSON string a line, a schema, and answers with one: empty if a grammar was made, else why not.
An answer before the first schema is empty if it can make grammars, else it says why not and the process ends.
"""

import os
import resource
import signal
import sys
import tempfile
from pathlib import Path

import msgspec

from loong.core.errors import InvalidRequestError
from loong.grammar.availability import import_failure
from loong.grammar.json_grammar import GrammarCompiler, allows_anything

MAX_GRAMMAR_BYTES = 2**24  # each worker keeps some dozens
_MAX_EXTRA_MEMORY = 2**29  # bytes
_MAX_SECONDS = 60  # for one schema, should nobody be left to end the process
_MAX_ANSWER = 1000  # characters: a schema may name things as long as itself
_WARNING = "Warning: "


def main() -> None:
    """Answer lines of standard input until it ends; arguments: a model folder, and its vocabulary's size."""
    folder, vocab_size = sys.argv[1:]
    answers = os.dup(sys.stdout.fileno())  # whatever else is printed is no answer
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
            why = _try(compiler, msgspec.json.decode(line, type=str), int(vocab_size))
            signal.alarm(0)
            if not why:
                os.lseek(warnings.fileno(), 0, os.SEEK_SET)
                why = _told(os.read(warnings.fileno(), 4096).decode(errors="replace"))
            os.write(answers, msgspec.json.encode(_cut(why)) + b"\n")


def _try(compiler: GrammarCompiler, schema: str, vocab_size: int) -> str:
    try:
        grammar = compiler.compile(schema)
        num_bytes, is_possible = grammar.memory_size_bytes, allows_anything(grammar, vocab_size)
    except InvalidRequestError as error:
        return str(error)
    except (RuntimeError, MemoryError, msgspec.DecodeError) as error:
        lines = str(error).strip().splitlines()
        reason = lines[-1].rsplit(": ", 1)[-1] if lines else type(error).__name__
        return f"no grammar can be made of the schema: {reason}"
    if num_bytes > MAX_GRAMMAR_BYTES:
        most = f"{MAX_GRAMMAR_BYTES} are the most"
        return f"the schema's grammar takes {num_bytes} bytes, and {most}"
    return "" if is_possible else "no answer fits the schema"


def _cut(why: str) -> str:
    return why if len(why) <= _MAX_ANSWER else f"{why[:_MAX_ANSWER]} ..."


def _told(warnings: str) -> str:
    """What the compiler left out of the grammar, which is all that it warns of."""
    if _WARNING not in warnings:
        return ""
    what = warnings.split(_WARNING, 1)[1].splitlines()[0]
    return f"the schema cannot be kept to: {what}"


def _limit_memory() -> None:
    """Let it grow by so much beyond what it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + _MAX_EXTRA_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main()
