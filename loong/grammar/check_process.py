"""A process that tries schemas, so that a schema that takes for ever, or all memory, takes only this process.

It reads one JSON string a line, a schema, and answers with one: empty if a grammar was made, else why not.
"""

import os
import resource
import sys
import tempfile
from pathlib import Path

import msgspec

from loong.core.errors import InvalidRequestError
from loong.grammar.json_grammar import GrammarCompiler

MAX_GRAMMAR_BYTES = 2**24  # each worker keeps some dozens
_MAX_EXTRA_MEMORY = 2**29  # bytes
_WARNING = "Warning: "


def main() -> None:
    """Answer lines of standard input until it ends; arguments: a model folder, and its vocabulary's size."""
    folder, vocab_size = sys.argv[1:]
    answers = os.dup(sys.stdout.fileno())  # whatever else is printed is no answer
    with tempfile.TemporaryFile() as warnings:
        os.dup2(warnings.fileno(), sys.stderr.fileno())
        os.dup2(warnings.fileno(), sys.stdout.fileno())
        compiler = GrammarCompiler(Path(folder), int(vocab_size))
        _limit_memory()
        os.write(answers, b'""\n')  # ready
        for line in sys.stdin.buffer:
            os.ftruncate(warnings.fileno(), 0)
            os.lseek(warnings.fileno(), 0, os.SEEK_SET)
            why = _try(compiler, msgspec.json.decode(line, type=str))
            if not why:
                os.lseek(warnings.fileno(), 0, os.SEEK_SET)
                why = _told(os.read(warnings.fileno(), 4096).decode(errors="replace"))
            os.write(answers, msgspec.json.encode(why) + b"\n")


def _try(compiler: GrammarCompiler, schema: str) -> str:
    try:
        num_bytes = compiler.compile(schema).memory_size_bytes
    except InvalidRequestError as error:
        return str(error)
    except (RuntimeError, MemoryError, msgspec.DecodeError) as error:
        lines = str(error).strip().splitlines()
        reason = lines[-1].rsplit(": ", 1)[-1] if lines else type(error).__name__
        return f"no grammar can be made of the schema: {reason}"
    if num_bytes > MAX_GRAMMAR_BYTES:
        most = f"{MAX_GRAMMAR_BYTES} are the most"
        return f"the schema's grammar takes {num_bytes} bytes, and {most}"
    return ""


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
