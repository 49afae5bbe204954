"""Search for stop strings in text that arrives in pieces."""

from collections.abc import Sequence


class StopStrings:
    """Passes text on up to the first stop string, whatever its pieces are.

    Text that may be the start of a stop string is held back until that is decided. The match is the one that
    ends first, and the longest of several that end together. So the result does not depend on the pieces.
    """

    def __init__(self, stops: Sequence[str], *, is_included: bool = False) -> None:
        """Search for `stops`. The text ends before the first one, or with it if `is_included`."""
        self._stops, self._is_included = stops, is_included
        self._held = ""
        self.matched: str | None = None

    def add(self, piece: str, *, may_end: bool = True) -> str:
        """Take more text, and return the text that is certain to be before any stop string.

        No stop string ends inside the piece unless it `may_end` there. It may still begin there.
        """
        text, num_before = self._held + piece, len(self._held)
        if may_end and (matched := self._first(text, num_before)) is not None:
            end, self.matched = matched
            self._held = ""
            return text[: end if self._is_included else end - len(self.matched)]
        num_held = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def _first(self, text: str, num_before: int) -> tuple[int, str] | None:
        """Return the first stop string that ends after `num_before` characters, and its end."""
        ends = []
        for stop in self._stops:
            at = text.find(stop, max(0, num_before + 1 - len(stop)))
            if at >= 0:
                ends.append((at + len(stop), -len(stop), stop))
        if not ends:
            return None
        end, _, stop = min(ends)
        return end, stop

    def finish(self) -> str:
        """Return the text held back, after the end of the text."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper end of `text` that is a start of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
