"""The inputs of a step on one instance: the progress of its requests, and the columns of its rows."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from loong.core.instructions import RequestInput, Sibling
from loong.core.placement import Placement
from loong.core.plan import QueryBlock
from loong.core.request import RequestId, TokenId
from loong.worker.sampling.sampling_input import DrawnToken


@dataclass(slots=True)
class Progress:
    """One request of a batch, as this instance knows it: `new_token_ids` only if it is the master."""

    given: RequestInput
    placement: Placement
    new_token_ids: list[TokenId]

    @classmethod
    def of(cls, inputs: Sequence[RequestInput]) -> "dict[RequestId, Progress]":
        """Return all requests of a batch as it begins."""
        return {given.request_id: cls(given, given.placement, []) for given in inputs}

    def token_ids(self, block: QueryBlock) -> Sequence[TokenId]:
        """Return the ids of a block's positions: given with the batch, or (in a lease) sampled last."""
        if self.new_token_ids:
            return self.new_token_ids[-1:]
        positions = block.positions
        if len(positions) == len(self.given.token_ids):  # as for decodes: all given ids
            return self.given.token_ids
        first = self.given.first_position
        return self.given.token_ids[positions.start - first : positions.stop - first : positions.step]

    @property
    def num_known_tokens(self) -> int:
        """Return the position of the next token, once all known tokens are computed."""
        return self.given.num_prompt_tokens + self.given.num_output_tokens + len(self.new_token_ids)

    def drawn(self) -> Iterator[DrawnToken]:
        """Yield the token of the request and of each sibling; none if the batch stops before the end."""
        given = self.given
        if given.sampling_params is not None:
            for drawn in (Sibling(given.request_id, given.sampling_params), *given.siblings):
                yield DrawnToken(drawn, given, self.new_token_ids)


class PendingTokenIds(NamedTuple):
    """Ids of tokens that the device samples before a step, and no host knows yet."""

    tokens: Tensor  # [N] int64, as drawn
    places: Tensor  # [2, n] int64: rows of the step, and of `tokens`

    def fill(self, token_ids: Tensor) -> None:
        """Write the ids into the rows [T] int64 of a step, all on the device."""
        rows, sources = self.places
        token_ids.index_copy_(0, rows, self.tokens[sources])


class StepInputs(NamedTuple):
    """Columns [T] int64 of the rows of a step, on the host; see `Decoder.forward`.

    `pending_ids` are ids that the device has yet to fill in; steps of a group have none.
    """

    token_ids: Tensor
    positions: Tensor
    lengths: Tensor
    pending_ids: PendingTokenIds | None = None

    @classmethod
    def of(
        cls,
        blocks: Sequence[QueryBlock],
        requests: Mapping[RequestId, Progress],
        pending_ids: PendingTokenIds | None,
    ) -> "StepInputs":
        """Return the inputs of a step's own blocks.

        The sequence length of a token does not depend on its chunk. It is the whole prompt for a token of the
        prompt, and for others the token itself with all before it.
        """
        token_ids: list[TokenId] = []
        positions: list[int] = []
        counts, num_prompt_tokens = [], []
        for block in blocks:
            request = requests[block.request_id]
            token_ids += request.token_ids(block)
            positions += block.positions
            counts.append(len(block.positions))
            num_prompt_tokens.append(request.given.num_prompt_tokens)
        columns = np.array([token_ids, positions, np.repeat(num_prompt_tokens, counts)], np.int64)
        np.maximum(columns[1] + 1, columns[2], out=columns[2])
        ids_there, positions_there, lengths = torch.from_numpy(columns)
        return cls(ids_there, positions_there, lengths, pending_ids)
