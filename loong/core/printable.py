"""Texts of others, such as clients, models and files, on their way to a terminal, a log or a picture."""

import re
from typing import Final

# A terminal obeys these, or writes what follows from right to left. Tabs and line breaks are not among them.
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Return a text with `\u001b` for a control character, which is the same text within a JSON string."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
