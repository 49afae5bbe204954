"""Log probabilities of prompts, computed in the steps that compute the prompts, some rows at a time."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from loong.attention.attention_step import AttentionStep
from loong.core.prompt_logprobs import PromptLogprobs, ScoredChunk
from loong.core.request import RequestId, TokenId
from loong.model.transformer import Decoder
from loong.worker.backend import Backend
from loong.worker.sampling.sampler import find_prompt_logprobs
from loong.worker.steps.step_inputs import Progress

LOGITS_AT_ONCE = 2**22  # bounds the logits that are in memory, and the wider copies made of them


class ScoredRows(NamedTuple):
    """Rows of a step, and the prompt's tokens, at `positions`, whose log probabilities they give."""

    request_id: RequestId
    rows: slice
    positions: range
    token_ids: Sequence[TokenId]
    num_top: int


class PendingScores:
    """Log probabilities of prompts in a step, which the device may have yet to compute."""

    def __init__(
        self, scored: Sequence[ScoredRows], hidden: Tensor, model: Decoder, backend: Backend
    ) -> None:
        """Score rows of hidden states [T, E]. All ranks of an instance do the same together."""
        self._scored = scored
        found = [tensor for rows in scored for tensor in _find(rows, hidden, model, backend)]
        self._reading = backend.read(*found)

    def results(self) -> tuple[PromptLogprobs, ...]:
        """Wait for the device and return the results; callable once."""
        read = iter(self._reading.wait())
        columns = [next(read).t().tolist() for _ in range(4 * len(self._scored))]
        return tuple(
            PromptLogprobs(rows.request_id, rows.positions, *columns[4 * number : 4 * number + 4])
            for number, rows in enumerate(self._scored)
        )


def scored_rows(
    step: AttentionStep, requests: Mapping[RequestId, Progress], scored: Sequence[ScoredChunk]
) -> Iterator[ScoredRows]:
    """Yield the rows to score of a step's own blocks, given its scored chunks.

    A row gives the log probability of the token after its own.
    """
    chunks = {chunk.request_id: chunk for chunk in scored}
    for block, rows in step.rows.items():
        if (chunk := chunks.get(block.request_id)) is None:
            continue
        given = requests[block.request_id].given
        first, own = given.first_position, block.positions
        next_tokens = [
            *given.token_ids[1 : given.num_prompt_tokens - first],
            *(() if chunk.next_token_id is None else (chunk.next_token_id,)),
        ]
        token_ids = next_tokens[own.start - first : own.stop - first : own.step]
        if token_ids:
            yield ScoredRows(
                block.request_id,
                slice(rows.start, rows.start + len(token_ids)),
                range(own.start + 1, own.stop + 1, own.step)[: len(token_ids)],
                token_ids,
                chunk.num_top,
            )


def _find(rows: ScoredRows, hidden: Tensor, model: Decoder, backend: Backend) -> Iterator[Tensor]:
    """Yield the columns of `find_prompt_logprobs` for all rows, computed some rows at a time."""
    hidden = hidden[rows.rows]
    token_ids = backend.device.upload(torch.tensor(rows.token_ids, dtype=torch.int64))
    size = max(1, LOGITS_AT_ONCE // model.shard.config.vocab_size)
    parts = [
        find_prompt_logprobs(
            model.logits(hidden[start : start + size]), token_ids[start : start + size], rows.num_top
        )
        for start in range(0, len(token_ids), size)
    ]
    for column in zip(*parts, strict=True):
        yield torch.cat(column)
