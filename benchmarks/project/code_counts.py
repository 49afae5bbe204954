"""Counts what makes a project hard to read, at one commit or at several, in columns.

Lines by package, large classes and functions, circles of imports, places that keep batches in flight, words
of pages, loose docstrings and the like. It enforces nothing.
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.append(str(Path(__file__).parents[1] / "support"))

from import_circles import circles, folder_graph, module_graph
from kept_batches import kept_by_batch
from result import print_result, script_parser

from loong.workloads.report.report import table

sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))
from code_prose import (
    LOOSE_STARTS,
    MAX_WORDS,
    PACKAGES,
    ROOT,
    commits,
    docstrings,
    is_loose,
    long_sentences,
    private_words,
)

MAX_MODULES = 16  # of a folder
MAX_FUNCTION = 50  # lines
GENERATED = ("api.md", "command-line.md")
WORKERS = ("loong/worker", "loong/fabric")  # they run batches, and do not plan them
READERS = ("launcher/plot", "loong/runs/report")  # of the logs of runs that are over
_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
Counts = Mapping[str, object]


@dataclass(frozen=True)
class Code:
    """The modules and pages of one commit, by their paths."""

    sources: Mapping[Path, str]
    pages: Mapping[Path, str]

    @classmethod
    def at(cls, commit: str) -> "Code":
        """Read a commit of this repository."""
        with TemporaryDirectory() as folder:
            archive = subprocess.run(["git", "-C", ROOT, "archive", commit], capture_output=True, check=True)
            subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
            root = Path(folder)
            modules = [path for name in PACKAGES for path in (root / name).rglob("*.py")]
            return cls(_texts(root, modules), _texts(root, root.rglob("*.md")))

    @cached_property
    def trees(self) -> Mapping[Path, ast.Module]:
        """The modules, parsed."""
        return {path: ast.parse(source) for path, source in self.sources.items()}

    @cached_property
    def classes(self) -> list[tuple[Path, ast.ClassDef]]:
        """All classes."""
        return [(path, node) for path, node in self._nodes() if isinstance(node, ast.ClassDef)]

    def _nodes(self) -> Iterator[tuple[Path, ast.AST]]:
        return ((path, node) for path, tree in self.trees.items() for node in ast.walk(tree))

    def lines_by_package(self) -> Counts:
        """Return the lines of each package, and of all."""
        lines = Counter[str]()
        for path, source in self.sources.items():
            lines[str(Path(*path.parts[:-1][:2]) if path.parts[0] == "loong" else path.parts[0])] += (
                source.count("\n")
            )
        return {"lines": lines.total(), **{f"lines of {name}": lines[name] for name in sorted(lines)}}

    def sizes(self) -> Counts:
        """Return the largest class, the class of most methods, and the functions that are long."""
        _, largest = max(self.classes, key=lambda found: _lines(found[1]))
        methods = {
            node.name: sum(isinstance(part, _FUNCTION) for part in node.body) for _, node in self.classes
        }
        busiest = max(methods, key=methods.__getitem__)
        long = [
            f"{path.stem}.{node.name} {_lines(node)}"
            for path, node in self._nodes()
            if isinstance(node, _FUNCTION) and path.parts[0] != "kernels" and _lines(node) > MAX_FUNCTION
        ]
        return {
            "largest class": f"{largest.name} {_lines(largest)}",
            "class of most methods": f"{busiest} {methods[busiest]}",
            f"functions over {MAX_FUNCTION} lines, without kernels": _listed(long),
        }

    def structure(self) -> Counts:
        """Return circles of imports, places that keep batches in flight, and crowded folders."""
        modules = module_graph({_dotted(path): tree for path, tree in self.trees.items()})
        packages = {_dotted(path) for path in self.trees if path.name == "__init__.py"}
        folders = Counter(path.parent for path in self.trees if path.name != "__init__.py")
        keepers = [
            node.name
            for path, node in self.classes
            if kept_by_batch(node) and not str(path).startswith((*WORKERS, *READERS))
        ]
        names = Counter(node.name for _, node in self.classes)
        return {
            "circles of modules": _listed([" ".join(found) for found in circles(modules)]),
            "circles of folders": len(circles(folder_graph(modules, packages))),
            "places that keep batches in flight": _listed(keepers),
            "modules": len(self.trees),
            f"folders of more than {MAX_MODULES} modules": sum(n > MAX_MODULES for n in folders.values()),
            "names of several classes": sum(count > 1 for count in names.values()),
        }

    def prose(self) -> Counts:
        """Return the words and numbers of pages, and loose docstrings."""
        words = {path: len(text.split()) for path, text in self.pages.items() if path.name != "LOG.md"}
        longest = max(words, key=words.__getitem__)
        texts = [text for tree in self.trees.values() for text in docstrings(tree)]
        written = [self.pages[path] for path in words]
        return {
            "words of pages without LOG.md": sum(words.values()),
            "the same without what is generated": sum(
                number for path, number in words.items() if path.name not in GENERATED
            ),
            "longest page": f"{longest.name} {words[longest]}",
            "numbers in pages": sum(len(re.findall(r"\b\d[\d,.]*\b", text)) for text in written),
            "commit hashes in pages": sum(len(commits(text)) for text in written),
            "docstrings": len(texts),
            f"docstrings that begin with {', '.join(LOOSE_STARTS)}": sum(map(is_loose, texts)),
            f"sentences of docstrings of over {MAX_WORDS} words": sum(
                len(list(long_sentences(text))) for text in texts
            ),
            "private words in code": len(private_words("\n".join(self.sources.values()))),
        }

    def counts(self) -> Counts:
        """Return all counts, by what they count."""
        return {**self.lines_by_package(), **self.sizes(), **self.structure(), **self.prose()}


def _texts(root: Path, paths: Iterator[Path] | list[Path]) -> Mapping[Path, str]:
    return {path.relative_to(root): path.read_text() for path in sorted(paths)}


def _lines(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def _dotted(path: Path) -> str:
    parts = path.with_suffix("").parts
    name = ".".join(parts if parts[0] == "loong" else ("loong", *parts))
    return name.removesuffix(".__init__")


def _listed(found: list[str]) -> str:
    return f"{len(found)}: {', '.join(found)}" if found else "0"


def main() -> None:
    """Count at each commit, and print a table."""
    parser = script_parser("code_counts", __doc__)
    parser.add_argument("commits", nargs="*", default=["HEAD"], help="commits (default: HEAD)")
    args = parser.parse_args()
    found = {commit: Code.at(commit).counts() for commit in args.commits}
    names = list(dict.fromkeys(name for counts in found.values() for name in counts))
    names = [*sorted(name for name in names if _is_size(name)), *(n for n in names if not _is_size(n))]
    rows = [(name, *(_shown(counts.get(name, 0)) for counts in found.values())) for name in names]
    print(table(("count", *(_short(commit) for commit in found)), rows), end="\n\n")
    print_result("code_counts", {"counts": found}, save=args.save)


def _is_size(name: str) -> bool:
    return name.startswith("lines")


def _shown(value: object) -> str:
    """Return a count, without the list of what is counted."""
    return f"{value:,}" if isinstance(value, int) else str(value).partition(":")[0]


def _short(commit: str) -> str:
    return commit[:9]


if __name__ == "__main__":
    main()
