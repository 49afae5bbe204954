"""How much a regular expression makes of a little text."""

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


def num_repetitions(pattern: str) -> int:
    """The most times that some part of it is to be repeated by counts, those within others multiplied.

    Any text is taken for a pattern, right or wrong.
    """
    groups = [1]  # the most within each that is open
    last = 1  # of what a count would repeat
    for part in _PARTS.finditer(pattern):
        if part["open"]:
            groups.append(1)
            last = 1
        elif part["close"]:
            last = groups.pop() if len(groups) > 1 else 1
        elif part["comma"] is not None and (part["least"] or part["most"]):
            last *= max(1, int(part["most"] or part["least"]))
        elif not part["star"]:
            last = 1
        groups[-1] = max(groups[-1], last)
    return max(groups)
