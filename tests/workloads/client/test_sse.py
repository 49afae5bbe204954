import itertools

from hypothesis import given
from hypothesis import strategies as st

from loong.workloads.client.sse import EventDecoder

LINES = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), min_size=1, max_size=20)


@given(events=st.lists(LINES), cuts=st.lists(st.integers(0, 400)), newline=st.sampled_from([b"\n", b"\r\n"]))
def test_events_are_the_same_however_the_stream_is_cut(
    events: list[str], cuts: list[int], newline: bytes
) -> None:
    stream = b"".join(
        b": comment" + newline * 2 + b"data: " + event.encode() + newline * 2 for event in events
    )
    edges = [0, *sorted(cuts), len(stream)]
    decoder = EventDecoder()
    decoded = []
    for start, end in itertools.pairwise(edges):
        decoded += decoder.feed(stream[start:end])
    assert decoded == events


def test_data_on_several_lines_is_one_event() -> None:
    assert EventDecoder().feed(b"data: a\ndata: b\nid: 3\n\n") == ["a\nb"]


def test_an_event_is_not_out_before_its_blank_line() -> None:
    decoder = EventDecoder()
    assert decoder.feed(b"data:x\n") == []
    assert decoder.feed(b"\n") == ["x"]
