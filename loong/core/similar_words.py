"""Guesses at the word that was meant by another."""

from collections.abc import Iterable
from difflib import get_close_matches

LEAST_SIMILARITY = 0.65  # of words that are mistaken for each other


def meant(word: str, known: Iterable[str], least_similarity: float = LEAST_SIMILARITY) -> str:
    """Return a question about the most similar known word, empty if none is similar."""
    likely = get_close_matches(word, known, n=1, cutoff=least_similarity)
    return f"; did you mean {likely[0]}?" if likely else ""
