"""The expansion of a regular expression by its repetition counts."""

import re

_PARTS = re.compile(
    r"\\."  # an escape
    r"|\[(?:\\.|[^\]\\])*\]"  # a class of characters
    r"|(?P<open>\()"
    r"|(?P<close>\))"
    r"|\{(?P<least>\d*)(?P<comma>,?)(?P<most>\d*)\}"
    r"|(?P<star>[*+?])"
    r"|.",
    re.DOTALL,
)


_MAX_DIGITS = 9  # of a count; a larger one is beyond any limit


def num_repetitions(pattern: str) -> int:
    """Return the most copies of some part of the pattern. Nested counts multiply.

    Any text is accepted as a pattern.
    """
    groups = [1]  # the most copies inside each open group
    last = 1  # copies of the part that a following count repeats
    for part in _PARTS.finditer(pattern):
        if part["open"]:
            groups.append(1)
            last = 1
        elif part["close"]:
            last = groups.pop() if len(groups) > 1 else 1
        elif part["comma"] is not None and (part["least"] or part["most"]):
            last *= max(1, _number(part["most"] or part["least"]))
        elif not part["star"]:
            last = 1
        groups[-1] = max(groups[-1], last)
    return max(groups)


def _number(digits: str) -> int:
    return int(digits) if len(digits) <= _MAX_DIGITS else 10**_MAX_DIGITS
