"""Counts what makes a project hard to read: crowded folders, large classes, long pages, loose docstrings.

It enforces nothing: the counts before and after a change show the effect of the change.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))

from result import print_result, script_parser

from loong.workloads.report.report import table

sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))
from code_prose import (
    LOOSE_STARTS,
    MAX_WORDS,
    ROOT,
    commits,
    docstrings,
    is_loose,
    long_sentences,
    modules,
    pages,
    private_words,
)

MAX_MODULES = 16  # of a folder


@dataclass(frozen=True, slots=True)
class Class:
    """A class of the code with its size."""

    name: str
    num_lines: int
    num_methods: int


def classes(tree: ast.Module) -> Iterator[Class]:
    """Yield the classes of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            methods = [part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
            assert node.end_lineno is not None
            yield Class(node.name, node.end_lineno - node.lineno + 1, len(methods))


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
    num_loose = sum(map(is_loose, texts))
    num_long = sum(len(list(long_sentences(text))) for text in texts)
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
        f"sentences of docstrings of over {MAX_WORDS} words": num_long,
        "private words in code": len(private_words(source)),
        "words of pages": sum(words.values()),
        "words of README.md": words[Path("README.md")],
        f"words of {longest}, the most": words[longest],
        "numbers in pages": sum(len(re.findall(r"\b\d[\d,.]*\b", text)) for text in documents.values()),
        "commit hashes in pages": sum(len(commits(text)) for text in documents.values()),
    }
    print(table(("count", ""), [(name, f"{value:,}") for name, value in counts.items()]), end="\n\n")
    print_result("code_counts", {"counts": counts}, save=args.save)


if __name__ == "__main__":
    main()
