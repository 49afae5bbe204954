"""Texts of others without the characters that a terminal obeys."""

import json
from unicodedata import category

from loong.core.printable import printable

ALL = "".join(map(chr, range(0x110000)))


def test_no_control_character_is_left_but_tabs_and_line_breaks() -> None:
    left = set(printable(ALL))
    assert {letter for letter in left if category(letter) in ("Cc", "Cs", "Zl", "Zp")} == {"\t", "\n"}
    assert not left & set(
        "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    )  # they reorder what follows


def test_what_people_write_stays_as_it_is() -> None:
    text = "naïve café, 日本語,\t\u05d0\u200f! 👩\u200d🚀\n"
    assert printable(text) == text


def test_a_json_text_stays_the_same_value() -> None:
    value = {"a": "\x1b[31m\x7f\x9b\u2028"}
    assert json.loads(printable(json.dumps(value, ensure_ascii=False))) == value
    assert "\x9b" not in printable(json.dumps(value, ensure_ascii=False))
