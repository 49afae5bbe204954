"""Responses are read alike however the network cuts them."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loong.workloads.client.http_response import HTTPFormatError, ResponseParser

BODY = b"data: one\n\ndata: two\n\n"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = (
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n4;note=x\r\ndata\r\n12\r\n: one\n\ndata: two\n\n\r\n"
    b"0\r\nTrailer: 1\r\n\r\n"
)
SIZED = HEAD + b"Content-Length: 22\r\n\r\n" + BODY
UNSIZED = HEAD + b"Connection: close\r\n\r\n" + BODY
INFORMED = b"HTTP/1.1 100 Continue\r\n\r\n" + SIZED


@given(
    stream=st.sampled_from([CHUNKED, SIZED, UNSIZED, INFORMED]),
    cuts=st.lists(st.integers(0, len(CHUNKED)), max_size=8).map(sorted),
)
def test_any_cut_gives_the_same_body(stream: bytes, cuts: list[int]) -> None:
    parser = ResponseParser()
    edges = [0, *cuts, len(stream)]
    pieces = [stream[start:end] for start, end in itertools.pairwise(edges)]
    body = b"".join(parser.feed(piece) for piece in pieces)
    assert body == BODY
    assert parser.status == 200
    assert parser.is_complete == (stream is not UNSIZED)
    assert parser.keeps_alive == (stream is not UNSIZED)
    parser.end()
    assert parser.is_complete


@pytest.mark.parametrize(
    ("head", "keeps_alive"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n", True),
        (b"HTTP/1.1 204 No Content\r\n", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: Close\r\n", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n", False),
    ],
)
def test_the_head_says_whether_the_connection_may_be_used_again(head: bytes, keeps_alive: bool) -> None:
    parser = ResponseParser()
    parser.feed(head + b"\r\n")
    assert parser.is_complete
    assert parser.keeps_alive == keeps_alive


@pytest.mark.parametrize(
    ("stream", "complaint"),
    [
        (b"SSH-2.0-hello\r\n\r\n", "no status"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n", "no length"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "no length"),
        (SIZED + b"more", "more than the response"),
        (b"x" * 70_000, "longer than"),
    ],
)
def test_what_is_no_response_is_said_to_be_none(stream: bytes, complaint: str) -> None:
    with pytest.raises(HTTPFormatError, match=complaint):
        ResponseParser().feed(stream)


@pytest.mark.parametrize("stream", [b"", SIZED[:-1], CHUNKED[:-1], HEAD])
def test_a_connection_that_ends_too_early_is_an_error(stream: bytes) -> None:
    parser = ResponseParser()
    parser.feed(stream)
    with pytest.raises(HTTPFormatError, match="connection was closed"):
        parser.end()
