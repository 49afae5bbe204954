"""Running counts of the lengths of outputs, which policies predict lengths from."""

from collections.abc import Mapping

from loong.core.output_lengths import LengthCounts, bin_of, maximum_class
from loong.state.live_request import LiveRequest

WINDOW = 1024  # outputs of a class, after which each earlier one counts half


class ObservedLengths:
    """The lengths of outputs that ended by themselves, by the class of their declared maximum."""

    def __init__(self) -> None:
        self._counts: dict[int, list[int]] = {}
        self._known: dict[int, LengthCounts] = {}

    @property
    def counts(self) -> Mapping[int, LengthCounts]:
        """Return the counts of each class. The mapping stays as it is when more is observed."""
        return self._known

    def see_end(self, live: LiveRequest) -> None:
        """Count the output of a request, which is complete."""
        if live.is_sound:
            self.add(live.request.sampling_params.max_tokens, len(live.output_token_ids))

    def add(self, max_tokens: int, length: int) -> None:
        """Count an output of a request that declared `max_tokens`."""
        declared, number = maximum_class(max_tokens), bin_of(length)
        counts = self._counts.setdefault(declared, [])
        counts += [0] * (number + 1 - len(counts))
        counts[number] += 1
        if sum(counts) >= WINDOW:
            counts[:] = [(count + 1) // 2 for count in counts]  # rare lengths stay
        self._known = {**self._known, declared: tuple(counts)}
