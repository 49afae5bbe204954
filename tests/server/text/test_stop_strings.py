from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from loong.server.text.stop_strings import StopStrings

LETTERS = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def _reported(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher = StopStrings(stops)
    reported = ""
    for piece in pieces:
        reported += matcher.add(piece)
        if matcher.matched is not None:
            return reported, matcher.matched
    return reported + matcher.finish(), None


@given(LETTERS, STOPS, st.lists(st.integers(0, 30)))
def test_how_the_text_is_cut_into_pieces_does_not_matter(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in pairwise(edges)]
    assert _reported(pieces, stops) == _reported(list(text), stops) == _reported([text], stops)


@given(st.lists(LETTERS), STOPS)
def test_no_stop_string_is_ever_reported(pieces: list[str], stops: list[str]) -> None:
    reported, matched = _reported(pieces, stops)
    text = "".join(pieces)
    assert not any(stop in reported for stop in stops)
    assert (matched is None) == (reported == text)
    assert text.startswith(reported + (matched or ""))


@given(st.lists(LETTERS), STOPS)
def test_only_the_beginning_of_a_stop_string_is_held_back(pieces: list[str], stops: list[str]) -> None:
    matcher = StopStrings(stops)
    taken = reported = ""
    for piece in pieces:
        taken, reported = taken + piece, reported + matcher.add(piece)
        if matcher.matched is not None:
            return
        held = taken[len(reported) :]
        assert not held or any(stop.startswith(held) for stop in stops)


@given(LETTERS, LETTERS, STOPS, st.integers(1, 5))
def test_a_stop_string_may_begin_before_it_may_end(
    early: str, late: str, stops: list[str], size: int
) -> None:
    matcher = StopStrings(stops)
    reported = "".join(matcher.add(early[i : i + size], may_end=False) for i in range(0, len(early), size))
    assert matcher.matched is None
    reported += matcher.add(late)
    text = early + late
    ends = [
        (end, -len(stop), stop)
        for end in range(len(early) + 1, len(text) + 1)
        for stop in stops
        if text[:end].endswith(stop)
    ]
    end, _, matched = min(ends, default=(len(text), 0, None))
    assert matcher.matched == matched
    assert reported + matcher.finish() == text[: end - len(matched or "")]


def test_the_first_match_to_end_cuts_the_text() -> None:
    assert _reported(["xxabcd"], ["abcd", "bc"]) == ("xxa", "bc")
    assert _reported(["xxabcd"], ["bcd", "abcd"]) == ("xx", "abcd")
