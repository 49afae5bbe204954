import pytest

from loong.core.similar_words import meant


@pytest.mark.parametrize(
    ("word", "asked"),
    [("replica", "; did you mean replicas?"), ("esq", "; did you mean esp?"), ("xyzzy", ""), ("", "")],
)
def test_a_word_that_is_nearly_another_is_asked_about(word: str, asked: str) -> None:
    assert meant(word, ("esp", "static-sp", "replicas")) == asked


def test_how_similar_words_must_be_can_be_said() -> None:
    assert meant("esq", ("esp",), 0.6) == "; did you mean esp?"
    assert meant("esq", ("esp",), 0.7) == ""
