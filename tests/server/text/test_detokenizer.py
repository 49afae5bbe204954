from collections.abc import Collection, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from loong.server.text.detokenizer import IncrementalDetokenizer
from loong.server.text.tokenizer import Tokenizer

_BYTE_CHARACTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


def _byte_level() -> Tokenizer:
    """Return bytes, some longer tokens that begin and end inside characters, and a special token."""
    vocab = {character: i for i, character in enumerate(_BYTE_CHARACTERS)}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    for text in ("héé", "日本", "Ġx", "👍a"):
        pieces = backend_bytes(text)
        for token in (pieces[1:], pieces[:-1], pieces):
            vocab.setdefault(token, len(vocab))
    backend = Backend(models.WordLevel(vocab=vocab, unk_token="a"))  # decodes as byte-level BPE does
    backend.add_special_tokens(["<|end|>"])
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


def backend_bytes(text: str) -> str:
    (piece,) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return piece[0]


def _byte_fallback() -> Tokenizer:
    """Return a tokenizer as of SentencePiece: a mark for the blank, and bytes for unknown characters."""
    pieces = ["<unk>", "▁", "▁a", "b", "▁▁", "日", "�", "é", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = Backend(models.WordLevel(vocab=vocab, unk_token="<unk>"))
    backend.add_special_tokens(["<s>"])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(backend)


def _metaspace() -> Tokenizer:
    """Return a tokenizer as of Unigram models, whose decoder drops all blanks of the first token."""
    pieces = ["<unk>", "▁", "▁a", "b", "▁▁", "日", "▁▁a"]
    backend = Backend(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    backend.add_special_tokens(["<s>"])
    backend.decoder = decoders.Metaspace()
    return Tokenizer(backend)


TOKENIZERS = {
    "byte-level": (_byte_level(), 275),
    "byte-fallback": (_byte_fallback(), 268),
    "metaspace": (_metaspace(), 8),
}


def _pieces(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    skip_special_tokens: bool = True,
    prompt: Sequence[int] = (),
    kept: Collection[int] = (),
) -> list[str]:
    detokenizer = IncrementalDetokenizer(
        tokenizer, prompt_token_ids=prompt, skip_special_tokens=skip_special_tokens, kept_token_ids=kept
    )
    return [*(detokenizer.add(token_id) for token_id in token_ids), detokenizer.finish()]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data(), skip=st.booleans())
def test_the_pieces_of_any_tokens_are_the_whole_text(name: str, data: st.DataObject, skip: bool) -> None:
    tokenizer, num_ids = TOKENIZERS[name]
    token_ids = data.draw(st.lists(st.integers(0, num_ids), max_size=60))
    whole = tokenizer.decode(token_ids, skip_special_tokens=skip)
    assert "".join(_pieces(tokenizer, token_ids, skip)) == whole


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data(), skip=st.booleans(), is_kept=st.booleans())
def test_a_prompt_and_the_pieces_after_it_are_the_whole_text(
    name: str, data: st.DataObject, skip: bool, is_kept: bool
) -> None:
    tokenizer, num_ids = TOKENIZERS[name]
    few = st.sampled_from([1, 2, 3, 4, 5, 6, *range(num_ids - 3, num_ids + 1)])  # blanks, special tokens
    token_ids = data.draw(st.lists(few | st.integers(0, num_ids), max_size=40))
    cut = data.draw(st.integers(0, len(token_ids)))
    kept = tokenizer.special_token_ids(["<s>", "<|end|>"]) if is_kept else frozenset[int]()
    shown = [i for i in token_ids if i in kept or not tokenizer.is_silent(i, skip_special_tokens=skip)]
    num_shown = sum(
        i in kept or not tokenizer.is_silent(i, skip_special_tokens=skip) for i in token_ids[:cut]
    )
    whole = tokenizer.decode(shown, skip_special_tokens=False)
    prompt = tokenizer.decode(shown[:num_shown], skip_special_tokens=False)
    text = "".join(_pieces(tokenizer, token_ids[cut:], skip, token_ids[:cut], kept))
    if whole.startswith(prompt):
        assert prompt + text == whole
    else:  # the prompt ends inside a character
        assert whole == prompt[: len(whole) - len(text)] + text
        assert prompt[len(whole) - len(text)] != text[0]


@pytest.mark.parametrize("skip", [True, False])
def test_the_first_token_of_an_answer_keeps_its_blank(skip: bool) -> None:
    for name in ("byte-fallback", "metaspace"):
        tokenizer, _ = TOKENIZERS[name]
        a, b, (start,) = 2, 3, tokenizer.special_token_ids(["<s>"])
        assert _pieces(tokenizer, [a, a, b], skip, [start, a]) == [" a", " a", "b", ""]
        assert _pieces(tokenizer, [a, a], skip, [a, start, start]) == [" a", " a", ""]
        assert "".join(_pieces(tokenizer, [a, start, a], skip, [b])) == (" a a" if skip else " a<s> a")
        assert _pieces(tokenizer, [start, a], True, [b], kept=[start]) == ["<s>", " a", ""]
        assert _pieces(tokenizer, [a], True, [start]) == ["a", ""]


def test_an_answer_may_complete_a_character_of_the_prompt() -> None:
    for name, before in (("byte-level", 65), ("byte-fallback", 3)):
        tokenizer, _ = TOKENIZERS[name]
        day = _byte_ids(tokenizer, "日".encode())
        for cut in (1, 2, 3):
            pieces = _pieces(tokenizer, [*day[cut:], before], prompt=[before, *day[:cut]])
            text = tokenizer.token_text(before)
            assert "".join(pieces) == (text if cut == 3 else f"日{text}")


def test_a_long_run_of_fallback_bytes_goes_on_in_the_answer() -> None:
    tokenizer, _ = TOKENIZERS["byte-fallback"]
    day = _byte_ids(tokenizer, "日".encode())
    for num_before in range(3):
        prompt = [*day[:num_before], *day * 700]
        assert "".join(_pieces(tokenizer, [*day, *day], prompt=prompt)) == "日日"


@given(
    st.lists(st.sampled_from([0x80, 0xBF, 0xC3, 0xE4, 0xF0, 0x9F, 0x41]), min_size=20, max_size=120),
    st.integers(1, 7),
)
def test_long_runs_of_invalid_bytes_read_the_same(seed_bytes: list[int], period: int) -> None:
    tokenizer, _ = TOKENIZERS["byte-level"]
    cycled = [seed_bytes[i % period] for i in range(100)] + seed_bytes
    token_ids = _ids_of_bytes(bytes(cycled))
    assert "".join(_pieces(tokenizer, token_ids)) == bytes(cycled).decode(errors="replace")


@given(st.text(max_size=40))
def test_no_character_is_reported_before_it_is_whole(text: str) -> None:
    tokenizer, _ = TOKENIZERS["byte-level"]
    pieces = _pieces(tokenizer, _ids_of_bytes(text.encode()))
    assert "".join(pieces) == text
    if "�" not in text:
        assert not any("�" in piece for piece in pieces)


@given(st.text(alphabet=st.characters(blacklist_characters="�", blacklist_categories=["Cs"]), max_size=40))
def test_a_whole_character_is_reported_at_once(text: str) -> None:
    tokenizer, _ = TOKENIZERS["byte-level"]
    detokenizer = IncrementalDetokenizer(tokenizer)
    for character in text:
        token_ids = _ids_of_bytes(character.encode())
        assert "".join(map(detokenizer.add, token_ids)) == character


def test_a_long_run_keeps_a_short_window() -> None:
    longest = 0

    class Watched:
        """The tokenizer, watched for how much it is asked to decode."""

        is_silent = tokenizer.is_silent
        is_fallback_byte = tokenizer.is_fallback_byte

        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
            nonlocal longest
            longest = max(longest, len(token_ids))
            return tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    detokenizer = IncrementalDetokenizer(Watched())
    for token_id in _ids_of_bytes(b"\x80" * 1000):
        detokenizer.add(token_id)
    assert longest < 40


tokenizer = TOKENIZERS["byte-level"][0]


def test_ids_without_a_token_say_nothing() -> None:
    assert _pieces(tokenizer, [100_000, *_ids_of_bytes(b"a"), 100_001]) == ["", "a", "", ""]


def _ids_of_bytes(content: bytes) -> list[int]:
    return _byte_ids(tokenizer, content)


def _byte_ids(tokenizer: Tokenizer, content: bytes) -> list[int]:
    byte_of = {bytes_: i for i, bytes_ in enumerate(tokenizer.token_bytes(i) for i in range(268))}
    return [byte_of[bytes([byte])] for byte in content]


def test_the_text_of_one_token_is_that_inside_a_text() -> None:
    tokenizer, _ = TOKENIZERS["byte-fallback"]
    (start,) = tokenizer.special_token_ids(["<s>"])
    assert [tokenizer.token_text(i) for i in (1, 2, 3, 4, start, 10_000)] == [" ", " a", "b", "  ", "<s>", ""]
    assert [tokenizer.token_name(i) for i in (2, 6, 8 + 0xE6)] == [
        " a",
        "bytes:\\xef\\xbf\\xbd",
        "bytes:\\xe6",
    ]
    assert [tokenizer.token_bytes(i) for i in (1, 2, 4, 8 + 0x20)] == [b" ", b" a", b"  ", b" "]
    assert [TOKENIZERS["metaspace"][0].token_text(i) for i in (1, 2, 4, 6)] == [" ", " a", "  ", "  a"]


def test_a_special_token_that_is_kept_is_reported_in_its_place(tokenizer: Tokenizer) -> None:
    tool = 263
    detokenizer = IncrementalDetokenizer(tokenizer, kept_token_ids={tool})
    token_ids = [*b"a", 257, 0xE6, tool, *"日".encode(), tool]
    pieces = [detokenizer.add(token_id) for token_id in token_ids] + [detokenizer.finish()]
    assert "".join(pieces) == "a\ufffd<|tool|>日<|tool|>"
    assert pieces[3] == "\ufffd<|tool|>"
