"""Log probabilities of a prompt's tokens, each given all tokens before it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from loong.core.errors import InvalidEventError
from loong.core.request import RequestId, TokenId


class ScoredChunk(NamedTuple):
    """A chunk of a prompt that a batch computes with log probabilities.

    `next_token_id` is the prompt's token after the chunk, None at its end. `num_top` is how many of the
    likeliest tokens are reported at each position.
    """

    request_id: RequestId
    next_token_id: TokenId | None
    num_top: int


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Natural-log probabilities of the prompt's tokens at `positions`, an entry each in every column.

    `chosen` are those of the prompt's own tokens. Their `ranks` count from 1, the likeliest; of equal tokens
    the lowest ids come first. `top_ids` and `top` have a column of the likeliest tokens, one of the second
    likeliest, and so on. Raises InvalidEventError if a column is of another length.
    """

    request_id: RequestId
    positions: range
    chosen: list[float]
    ranks: list[int]
    top_ids: list[list[TokenId]]
    top: list[list[float]]

    def __post_init__(self) -> None:
        lengths = {len(self.chosen), len(self.ranks), *map(len, self.top_ids), *map(len, self.top)}
        if lengths != {len(self.positions)}:
            raise InvalidEventError(
                f"{len(self.positions)} positions of the prompt of {self.request_id} were scored, "
                f"but columns have {sorted(lengths)} entries"
            )

    def top_at(self, index: int, count: int) -> Sequence[tuple[TokenId, float]]:
        """Return the `count` likeliest tokens at the position of this index, the likeliest first."""
        columns = zip(self.top_ids[:count], self.top[:count], strict=True)
        return [(ids[index], logprobs[index]) for ids, logprobs in columns]


class AssembledLogprobs:
    """The log probabilities of a whole prompt, assembled from its stripes and chunks.

    Entries computed twice, as after a preemption, replace the earlier ones.
    """

    def __init__(self, request_id: RequestId, num_prompt_tokens: int, num_top: int) -> None:
        count = num_prompt_tokens - 1  # nothing comes before the first
        self.whole = PromptLogprobs(
            request_id,
            range(1, num_prompt_tokens),
            [0.0] * count,
            [0] * count,
            [[0] * count for _ in range(num_top)],
            [[0.0] * count for _ in range(num_top)],
        )
        self._is_missing = bytearray(b"\1" * count)

    @property
    def is_complete(self) -> bool:
        """Return whether every position but the first has an entry."""
        return 1 not in self._is_missing

    def add(self, part: PromptLogprobs) -> None:
        """Add the entries of some positions.

        Raises `InvalidEventError` for those that the prompt does not have.
        """
        whole, positions = self.whole, part.positions
        if not positions:
            return
        are_there = positions.step > 0 and all(
            p in whole.positions for p in (*positions[:1], *positions[-1:])
        )
        if not are_there or len(part.top) != len(whole.top) or len(part.top_ids) != len(whole.top_ids):
            raise InvalidEventError(
                f"{positions} of the prompt of {part.request_id} were scored with {len(part.top)} of the "
                f"likeliest tokens, but {whole.positions} were asked for with {len(whole.top)}"
            )
        places = slice(positions[0] - 1, positions[-1], positions.step)
        whole.chosen[places] = part.chosen
        whole.ranks[places] = part.ranks
        for column, piece in zip(whole.top_ids, part.top_ids, strict=True):
            column[places] = piece
        for logprobs, values in zip(whole.top, part.top, strict=True):
            logprobs[places] = values
        self._is_missing[places] = bytes(len(positions))
