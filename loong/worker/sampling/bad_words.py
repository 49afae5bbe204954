"""Bad words of several tokens: an output may have all their tokens but the last."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from loong.core.request import TokenId
from loong.worker.sampling.sampling_input import SamplingInput

_ANY, _NONE = -1, -2  # in place of a token: equals each, equals none


class BadWords:
    """Blocks the last token of each word whose other tokens are the newest ones of the output."""

    def __init__(
        self, inputs: Sequence[SamplingInput], vocab_size: int, upload: Callable[[Tensor], Tensor]
    ) -> None:
        """Take the inputs of the first step, a row each. `upload` copies a tensor to the logits' device."""
        found = [
            (row, word)
            for row, item in enumerate(inputs)
            for word in item.params.bad_words
            if len(word) > 1 and word[-1] < vocab_size
        ]
        length = max((len(word) - 1 for _, word in found), default=0)
        self._rows = upload(torch.tensor([row for row, _ in found], dtype=torch.int64))
        self._places = upload(torch.tensor([row * vocab_size + word[-1] for row, word in found]))
        self._firsts = upload(_ends([word[:-1] for _, word in found], length, _ANY))
        self._newest = upload(_ends([item.output_token_ids for item in inputs], length, _NONE))

    def apply(self, flat: Tensor) -> None:
        """Block tokens of logits [N * V] in place."""
        is_begun = (self._firsts == self._newest[self._rows]) | (self._firsts == _ANY)
        flat.index_add_(0, self._places, torch.where(is_begun.all(dim=1), -torch.inf, 0.0))

    def advance(self, tokens: Tensor) -> None:
        """Go to the next step, given the tokens [N] int64 of this one."""
        self._newest = torch.cat([self._newest[:, 1:], tokens.unsqueeze(1)], dim=1)


def _ends(sequences: Sequence[Sequence[TokenId]], length: int, filler: int) -> Tensor:
    """Return the last tokens of each sequence, [N, length], after fillers where there are fewer."""
    rows = [[*[filler] * (length - len(ids)), *ids[max(0, len(ids) - length) :]] for ids in sequences]
    return torch.tensor(rows, dtype=torch.int64)
