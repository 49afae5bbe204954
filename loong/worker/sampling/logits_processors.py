"""Logits processors: changes of logits before tokens are drawn, step after step."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from loong.core.limits import MAX_TOKENS
from loong.core.request import TokenId
from loong.kernels.sampling.draw_params import Penalties
from loong.worker.sampling.bad_words import BadWords
from loong.worker.sampling.grammar_constraints import AllowedTokens
from loong.worker.sampling.sampling_input import SamplingInput


class LogitsOps(Protocol):
    """The operations that each kind of device implements."""

    def upload(self, tensor: Tensor) -> Tensor:
        """Copy a tensor of the host to the device of the logits; the host may change it at once."""

    def penalize(self, logits: Tensor, penalties: Penalties) -> None:
        """Apply the penalties of each row of logits [N, V], float32, contiguous, in place."""


class LogitsProcessors:
    """Adjusts the logits of N rows, of which each gets one token a step.

    They apply in this order: `min_tokens` blocks tokens that would end the output, bad words their last
    tokens, then biases, penalties, and the mask of allowed tokens.
    """

    def __init__(self, inputs: Sequence[SamplingInput], vocab_size: int, ops: LogitsOps) -> None:
        """Take the inputs of the first step, a row each."""
        self._ops, self._vocab_size = ops, vocab_size
        self._num_steps = 0
        self._find_stops(inputs)
        has_bad_words = any(len(word) > 1 for item in inputs for word in item.params.bad_words)
        self._bad_words = BadWords(inputs, vocab_size, ops.upload) if has_bad_words else None
        self._find_biases(inputs)
        penalized = [row for row, item in enumerate(inputs) if item.params.has_penalties]
        self._penalized = self._upload(penalized)
        if penalized:
            self._count([inputs[row] for row in penalized])
        constrained = {row: item.allowed for row, item in enumerate(inputs) if item.allowed is not None}
        self._constrained = self._upload([*constrained])
        self.allow(constrained.values())

    def apply(self, logits: Tensor) -> None:
        """Adjust logits [N, V] float32, contiguous, in place, for this step's tokens."""
        flat = logits.view(-1)
        if num_stops := bisect_left(self._stops_end, -self._num_steps):
            flat.index_fill_(0, self._stops[:num_stops], -torch.inf)
        if self._bad_words is not None:
            self._bad_words.apply(flat)
        if len(self._biases):
            flat.index_add_(0, self._biased, self._biases)
        if len(rows := self._penalized):
            part = logits[rows]
            self._ops.penalize(part, self._penalties)
            logits[rows] = part
        if len(rows := self._constrained):
            logits[rows] = logits[rows].masked_fill(_is_blocked(self._allowed, self._vocab_size), -torch.inf)

    def advance(self, tokens: Tensor) -> None:
        """Go to the next step, given the tokens [N] int64 of this one."""
        self._num_steps += 1
        if self._bad_words is not None:
            self._bad_words.advance(tokens)
        if len(self._penalized):
            seen = self._first + tokens[self._penalized]
            self._penalties.num_in_output.view(-1).index_add_(0, seen, self._ones)

    def allow(self, masks: Iterable[AllowedTokens]) -> None:
        """Set the mask of the next step for each row that has one; see `SamplingInput.allowed`."""
        if words := [mask.words for mask in masks]:
            self._allowed = self._ops.upload(torch.stack(words))

    def _find_stops(self, inputs: Sequence[SamplingInput]) -> None:
        """List the tokens that may not come yet, those blocked for most steps first.

        Bad words of one token are blocked for ever.
        """
        found = sorted(
            (end, row * self._vocab_size + token_id)
            for row, item in enumerate(inputs)
            for end, token_ids in (
                (item.num_output_tokens - item.params.min_tokens, item.params.stop_token_ids),
                (-MAX_TOKENS, [word[0] for word in item.params.bad_words if len(word) == 1]),
            )
            for token_id in token_ids
            if end < 0 and token_id < self._vocab_size
        )
        self._stops_end = [end for end, _ in found]
        self._stops = self._upload([place for _, place in found])

    def _find_biases(self, inputs: Sequence[SamplingInput]) -> None:
        found = {
            row * self._vocab_size + token_id: bias
            for row, item in enumerate(inputs)
            for token_id, bias in item.params.logit_bias
            if token_id < self._vocab_size
        }
        self._biased = self._upload([*found])
        self._biases = self._ops.upload(torch.tensor([*found.values()], dtype=torch.float32))

    def _count(self, inputs: Sequence[SamplingInput]) -> None:
        """Record the tokens that each penalized row has seen, and its penalties."""

        def column(values: Iterable[float]) -> Tensor:
            return self._ops.upload(torch.tensor([*values], dtype=torch.float32))

        params = [item.params for item in inputs]
        self._penalties = Penalties(
            repetition=column(p.repetition_penalty for p in params),
            frequency=column(p.frequency_penalty for p in params),
            presence=column(p.presence_penalty for p in params),
            is_in_prompt=self._counts([item.prompt_token_ids for item in inputs]) > 0,
            num_in_output=self._counts([item.output_token_ids for item in inputs]),
        )
        self._first = self._upload(range(0, len(inputs) * self._vocab_size, self._vocab_size))
        self._ones = torch.ones_like(self._first, dtype=torch.int32)

    def _counts(self, token_ids: Sequence[Sequence[TokenId]]) -> Tensor:
        """Return how often each row has each token, [N, V] int32."""
        lengths = list(map(len, token_ids))
        places = np.fromiter(chain.from_iterable(token_ids), np.int64, sum(lengths))
        places += np.repeat(np.arange(len(lengths)) * self._vocab_size, lengths)
        flat = self._ops.upload(torch.from_numpy(places))
        shape = len(token_ids), self._vocab_size
        counts = torch.zeros(shape, dtype=torch.int32, device=flat.device)
        counts.view(-1).index_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
        return counts

    def _upload(self, values: Sequence[int]) -> Tensor:
        return self._ops.upload(torch.tensor(values, dtype=torch.int64))


def _is_blocked(allowed: Tensor, vocab_size: int) -> Tensor:
    """Return the tokens that rows may not take, bool [N, V], from a bit for each that they may.

    Bits are faster to copy.
    """
    shifts = torch.arange(32, dtype=torch.int32, device=allowed.device)
    bits = (allowed.unsqueeze(-1) >> shifts) & 1
    return bits.flatten(1)[:, :vocab_size] == 0
