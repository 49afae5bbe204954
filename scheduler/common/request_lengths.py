"""The lengths of requests in columns, for vectorized computations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loong.core.request import RequestView


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """Tokens of each of `views`: the known ones, those it may still produce, and those at its end.

    `kin` are, by index, the requests that share KV or have siblings; most requests have none.
    """

    views: Sequence[RequestView]
    known: NDArray[np.int64]
    remaining: NDArray[np.int64]
    final: NDArray[np.int64]
    kin: Mapping[int, RequestView]

    @classmethod
    def of(cls, views: Sequence[RequestView]) -> "Lengths":
        """Return the lengths of these requests."""
        prompt = np.array([view.num_prompt_tokens for view in views], np.int64)
        output = np.array([view.num_output_tokens for view in views], np.int64)
        most = np.array([view.max_tokens for view in views], np.int64)
        kin = {i: view for i, view in enumerate(views) if view.num_siblings or view.borrowed}
        final = prompt + most - 1
        for place, view in kin.items():
            final[place] = view.num_final_tokens
        return cls(views, prompt + output, most - output, final, kin)

    def adding(self, views: Sequence[RequestView]) -> "Lengths":
        """Return the lengths with these requests added after the others."""
        if not views:
            return self
        more, num_before = Lengths.of(views), len(self.views)
        return Lengths(
            (*self.views, *views),
            np.concatenate((self.known, more.known)),
            np.concatenate((self.remaining, more.remaining)),
            np.concatenate((self.final, more.final)),
            {**self.kin, **{num_before + place: view for place, view in more.kin.items()}},
        )
