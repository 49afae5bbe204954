"""Counts what makes a project hard to read: crowded folders, large classes, long pages, loose docstrings.

It measures and enforces nothing: the counts before and after a change show what the change did.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from result import print_result, script_parser

from loong.workloads.report.report import table

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("loong", "kernels", "scheduler", "launcher", "workloads")
MAX_MODULES = 16  # of a folder
MAX_WORDS = 25  # of a sentence
LOOSE_STARTS = ("What", "Whether", "Who", "That", "How", "Which")
PRIVATE_WORDS = ("tell", "told", "mend", "whoever", "reckon", "roster", "gather", "beside")
COMMIT = re.compile(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7}\b")
SENTENCE_END = re.compile(r"(?<=[.!?:;])\s+|\n\s*\n|\n\s*[-*|]")


@dataclass(frozen=True, slots=True)
class Class:
    """A class of the code with its size."""

    name: str
    num_lines: int
    num_methods: int


def modules() -> list[Path]:
    """Return the modules of all packages; a package that is linked into another counts once."""
    return sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))


def pages() -> list[Path]:
    """Return the pages that a reader of the project meets."""
    folders = (*PACKAGES, "docs", "tests", "benchmarks")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.md")]
    return [ROOT / "README.md", *sorted(found)]


def classes(tree: ast.Module) -> Iterator[Class]:
    """Yield the classes of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            methods = [part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
            assert node.end_lineno is not None
            yield Class(node.name, node.end_lineno - node.lineno + 1, len(methods))


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield the docstrings of a module, its classes and its functions."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented) and (text := ast.get_docstring(node)) is not None:
            yield text


def num_long_sentences(text: str) -> int:
    """Return how many sentences of a docstring are too long."""
    return sum(len(sentence.split()) > MAX_WORDS for sentence in SENTENCE_END.split(text))


def main() -> None:
    """Count, and print a table."""
    args = script_parser("code_counts", __doc__).parse_args()
    trees = {path: ast.parse(path.read_text()) for path in modules()}
    texts = [text for tree in trees.values() for text in docstrings(tree)]
    source = "\n".join(path.read_text() for path in trees)
    found = [one for tree in trees.values() for one in classes(tree)]
    folders = Counter(path.parent.relative_to(ROOT) for path in trees if path.name != "__init__.py")
    names = Counter(one.name for one in found)
    documents = {path: path.read_text() for path in pages()}
    largest, busiest = max(found, key=lambda c: c.num_lines), max(found, key=lambda c: c.num_methods)
    words = {path.relative_to(ROOT): len(text.split()) for path, text in documents.items()}
    longest = max(words, key=lambda path: words[path])
    folder, num_modules = folders.most_common(1)[0]
    num_loose = sum(text.split()[0] in LOOSE_STARTS for text in texts)
    counts = {
        "modules": len(trees),
        "lines": source.count("\n"),
        f"folders of more than {MAX_MODULES} modules": sum(n > MAX_MODULES for n in folders.values()),
        f"modules of {folder}, the most": num_modules,
        f"lines of class {largest.name}, the most": largest.num_lines,
        f"methods of class {busiest.name}, the most": busiest.num_methods,
        "names of several classes": sum(count > 1 for count in names.values()),
        "docstrings": len(texts),
        f"docstrings that begin with {', '.join(LOOSE_STARTS)}": num_loose,
        f"sentences of docstrings of over {MAX_WORDS} words": sum(map(num_long_sentences, texts)),
        **{f"'{word}' in code": len(re.findall(rf"\b{word}\b", source)) for word in PRIVATE_WORDS},
        "words of pages": sum(words.values()),
        "words of README.md": words[Path("README.md")],
        f"words of {longest}, the most": words[longest],
        "numbers in pages": sum(len(re.findall(r"\b\d[\d,.]*\b", text)) for text in documents.values()),
        "commit hashes in pages": sum(len(COMMIT.findall(text)) for text in documents.values()),
    }
    print(table(("count", ""), [(name, f"{value:,}") for name, value in counts.items()]), end="\n\n")
    print_result("code_counts", {"counts": counts}, save=args.save)


if __name__ == "__main__":
    main()
