"""Docstrings, comments, messages and pages keep the project's rules of language."""

import ast
from collections.abc import Callable, Iterable
from functools import cache

import pytest
from code_prose import (
    MAX_WORDS,
    ROOT,
    comments,
    commits,
    docstrings,
    is_loose,
    long_sentences,
    modules,
    pages,
    private_names,
    private_words,
    scripts,
    strings,
)

WORDS = "one two three four five six seven eight nine ten eleven twelve thirteen"


@cache
def sources() -> dict[str, str]:
    """Return the code of each module and script, by its path."""
    return {str(path.relative_to(ROOT)): path.read_text() for path in (*modules(), *scripts())}


@cache
def trees() -> dict[str, ast.Module]:
    """Return the same, parsed."""
    return {name: ast.parse(source) for name, source in sources().items()}


@cache
def page_texts() -> dict[str, str]:
    """Return the text of each page, by its path."""
    return {str(path.relative_to(ROOT)): path.read_text() for path in pages() if path.name != "LOG.md"}


def broken(find: Callable[[str], Iterable[str]], texts: Callable[[str], Iterable[str]]) -> list[str]:
    """Return the places where `find` finds something in the texts of a module."""
    return [f"{name}: {found}" for name in sources() for text in texts(name) for found in find(text)]


def docstrings_of(name: str) -> Iterable[str]:
    """Return the docstrings of a module."""
    return docstrings(trees()[name])


def texts_of(name: str) -> Iterable[str]:
    """Yield the strings, docstrings among them, and the comments of a module."""
    yield from strings(trees()[name])
    yield from comments(sources()[name])


def test_the_laws_see_all_packages() -> None:
    assert {name.partition("/")[0] for name in sources()} == {
        "loong",
        "kernels",
        "scheduler",
        "launcher",
        "workloads",
        "benchmarks",
    }
    assert sum(len(list(docstrings(tree))) for tree in trees().values()) > 3_000
    assert sum(len(list(comments(source))) for source in sources().values()) > 1_000
    assert {"README.md", "docs/architecture.md"} <= page_texts().keys()


@pytest.mark.parametrize(
    "text", ["What there is.", "Whether it is.", "Who asks.", "That which is.", "How many."]
)
def test_a_loose_start_is_found(text: str) -> None:
    assert is_loose(text)
    assert not is_loose(f"Return {text}")


def test_a_long_sentence_is_found() -> None:
    assert list(long_sentences(f"Short.\n\n{WORDS} {WORDS}.\nShort."))
    assert not list(long_sentences(f"{WORDS}. {WORDS}: {WORDS}"))


def test_private_words_are_found() -> None:
    assert private_words("It tells so many of them, and gathers.") == ["tells", "so many", "gathers"]
    assert private_words("An all-gather, as `told` by intelligent bookkeeping.") == []
    assert set(private_names("told_at = ToldBatch(outdoor, asyncio.gather)")) == {"told_at", "ToldBatch"}


def test_commits_are_found() -> None:
    assert commits("Since 1a2b3c4, and 2,000,000 tokens of deadbeef.") == ["1a2b3c4"]


def test_no_docstring_begins_with_a_question_word() -> None:
    assert not broken(lambda text: [text.splitlines()[0]] if is_loose(text) else [], docstrings_of)


def test_no_sentence_of_a_docstring_is_long() -> None:
    assert not broken(long_sentences, docstrings_of), f"more than {MAX_WORDS} words"


def test_no_text_has_private_words() -> None:
    assert not broken(lambda text: [text] if private_words(text) else [], texts_of)


def test_no_name_has_private_words() -> None:
    assert not [f"{name}: {found}" for name, source in sources().items() for found in private_names(source)]


def test_no_text_names_a_commit() -> None:
    assert not broken(commits, lambda name: (*docstrings_of(name), *comments(sources()[name])))


def test_no_page_names_a_commit() -> None:
    assert not [f"{name}: {found}" for name, text in page_texts().items() for found in commits(text)]
