"""The text of the project's code and pages: docstrings, comments, messages, names, and the rules for them."""

import ast
import re
import tokenize
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("loong", "kernels", "scheduler", "launcher", "workloads")
MAX_WORDS = 25  # of a sentence
LOOSE_STARTS = ("What", "Whether", "Who", "That", "How", "Which")
PRIVATE_WORDS = (
    *(
        "tell",
        "tells",
        "told",
        "telling",
        "mend",
        "mends",
        "mended",
        "whoever",
        "whomever",
        "reckon",
        "reckons",
    ),
    *(
        "roster",
        "gather",
        "gathers",
        "beside",
        "so many",
        "book",
        "books",
        "door",
        "knock",
        "knocks",
        "likewise",
    ),
)
WORDS_OF_NAMES = frozenset(PRIVATE_WORDS) - {
    "gather",
    "beside",
}  # names of libraries, and of cost model files
COMMIT = re.compile(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])(?:[0-9a-f]{7,12}|[0-9a-f]{40})\b")
SENTENCE_END = re.compile(r"(?<=[.!?:;])\s+|\n\s*\n|\n\s*[-*|├└]")
_PRIVATE = re.compile(rf"(?<!all-)\b({'|'.join(PRIVATE_WORDS)})\b", re.IGNORECASE)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def modules() -> list[Path]:
    """Return the modules of all packages. A package that is linked into another counts once."""
    return sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))


def scripts() -> list[Path]:
    """Return the scripts of the benchmarks."""
    return sorted((ROOT / "benchmarks").rglob("*.py"))


def pages() -> list[Path]:
    """Return the Markdown pages of the project."""
    folders = (*PACKAGES, "docs", "tests", "benchmarks")
    return sorted(
        [*ROOT.glob("*.md"), *(path for folder in folders for path in (ROOT / folder).rglob("*.md"))]
    )


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield the docstrings of a module, its classes and its functions."""
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)) is not None:
            yield text


def strings(tree: ast.Module) -> Iterator[str]:
    """Yield the string constants of several words: docstrings, messages and parts of f-strings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            yield node.value


def comments(source: str) -> Iterator[str]:
    """Yield the comments of a module."""
    for token in tokenize.generate_tokens(StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def private_names(source: str) -> Iterator[str]:
    """Yield the identifiers of a module with a private word between underscores or capitals."""
    tokens = tokenize.generate_tokens(StringIO(source).readline)
    for name in {token.string for token in tokens if token.type == tokenize.NAME}:
        words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)
        if WORDS_OF_NAMES.intersection(word.lower() for word in words):
            yield name


def is_loose(text: str) -> bool:
    """Return whether a docstring begins with a word such as What or Whether."""
    return text.split()[0] in LOOSE_STARTS


def long_sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a docstring with more than MAX_WORDS words."""
    return (sentence for sentence in SENTENCE_END.split(text) if len(sentence.split()) > MAX_WORDS)


def private_words(text: str) -> list[str]:
    """Return the private words in a text, without those in backticks."""
    return [match[0] for match in _PRIVATE.finditer(re.sub(r"`[^`]*`", "", text))]


def commits(text: str) -> list[str]:
    """Return words that look like commit hashes."""
    return COMMIT.findall(text)
