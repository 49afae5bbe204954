"""Sampling in leases for requests that need more than a draw from unchanged logits."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from loong.core.events import Logprobs
from loong.core.instructions import RequestInput, Sibling
from loong.core.request import FinishReason, SamplingParams, TokenId
from loong.kernels.sampling.draw_params import DrawParams
from loong.worker.backend import Backend
from loong.worker.sampling.grammar_constraints import AllowedTokens, Constraints
from loong.worker.sampling.logits_processors import LogitsProcessors
from loong.worker.sampling.sampler import find_logprobs, read_logprobs
from loong.worker.sampling.sampling_input import DrawnToken, SamplingInput, sampling_inputs


class LeaseSampling:
    """Samples again after a captured step, for rows that need more than the step can do.

    All of it runs on the device, after the step. Only a grammar needs each token on the host before the next
    one is chosen. The device computes the next step's logits during that time.
    """

    def __init__(
        self, given: Sequence[RequestInput], constraints: Constraints, vocab_size: int, backend: Backend
    ) -> None:
        """Take the requests of a lease, a row each."""
        self._given, self._constraints, self._backend = given, constraints, backend
        self._new_token_ids: dict[int, list[TokenId]] = {
            row: [] for row, item in enumerate(given) if not _params(item).is_plain
        }
        inputs = self._made([*self._new_token_ids])
        self._allowed = {row: item.allowed for row, item in inputs.items() if item.allowed is not None}
        self._held = {row for row, item in inputs.items() if item.params.grammar is not None}
        self._continued: list[int] = []  # rows with a grammar that have a token, and need another
        self._adjusted: Tensor | None = None
        self._inputs = {row: item for row, item in inputs.items() if item.has_logits_processors}
        if self._inputs:
            self._adjusted = self._upload([*self._inputs])
            self._logits_processors = LogitsProcessors([*self._inputs.values()], vocab_size, backend.sampler)
        self._num_logprobs = {
            row: item.params.num_logprobs
            for row, item in inputs.items()
            if item.params.num_logprobs is not None
        }
        self._reported = self._upload([*self._num_logprobs]) if self._num_logprobs else None

    @property
    def needs_tokens(self) -> bool:
        """Return whether each step's tokens must be read before the next one's are chosen."""
        return bool(self._held)

    def choose(
        self, logits: Tensor, params: DrawParams, *, tokens: Tensor, largest: Tensor
    ) -> tuple[Tensor, ...]:
        """Correct the tokens drawn from logits [N, V] by `Backend.draw`; return further tensors to read."""
        if (rows := self._adjusted) is not None:
            part = logits[rows]
            raw = part.amax(dim=1)
            self._logits_processors.apply(part)
            drawn, peaks = torch.empty_like(rows), torch.empty_like(raw)
            own = DrawParams(*(values[rows] for values in params))
            self._backend.draw(part, own, tokens=drawn, largest=peaks)
            tokens[rows] = drawn
            largest[rows] = torch.where(raw.isfinite(), peaks, raw)
            self._logits_processors.advance(drawn)
        if (rows := self._reported) is not None:
            return find_logprobs(logits[rows], tokens[rows], max(self._num_logprobs.values()))
        return ()

    def logprobs(self, found: Sequence[Tensor]) -> dict[int, Logprobs]:
        """Return log probabilities by row, from the tensors that `choose` returned."""
        if not found:
            return {}
        counts = self._num_logprobs
        return dict(zip(counts, read_logprobs(found, list(counts.values())), strict=True))

    def take(self, row: int, token_id: TokenId, reason: FinishReason | None) -> None:
        """Record the token of a row, and its end if there is a reason."""
        if row not in self._held:
            return
        self._new_token_ids[row].append(token_id)
        if reason is None:
            self._continued.append(row)
        else:
            self._constraints.forget(self._given[row].request_id)
            words = torch.full_like(self._allowed[row].words, -1)  # tokens after the end are not read
            self._allowed[row] = AllowedTokens(words)

    def end_step(self) -> None:
        """End a step, all of whose tokens have been taken."""
        for row, item in self._made(self._continued).items():
            assert item.allowed is not None, "it has a grammar"
            self._allowed[row] = item.allowed
        self._continued.clear()
        self._logits_processors.allow(self._allowed.values())

    def why_invalid(self, row: int, largest: float) -> FinishReason:
        """Return why a row has no token, given its largest logit."""
        return why_invalid(self._inputs.get(row), self._allowed.get(row), largest)

    def _made(self, rows: Sequence[int]) -> dict[int, SamplingInput]:
        drawn = [
            DrawnToken(Sibling(given.request_id, _params(given)), given, self._new_token_ids[row])
            for row, given in ((row, self._given[row]) for row in rows)
        ]
        return dict(zip(rows, sampling_inputs(drawn, self._constraints), strict=True))

    def _upload(self, rows: Sequence[int]) -> Tensor:
        return self._backend.sampler.upload(torch.tensor(rows, dtype=torch.int64))


def _params(given: RequestInput) -> SamplingParams:
    assert given.sampling_params is not None, "it is sampled"
    return given.sampling_params


def why_invalid(given: SamplingInput | None, allowed: AllowedTokens | None, largest: float) -> FinishReason:
    """Return why a row has no token, given its largest logit: nothing is allowed, or it is not finite."""
    if given is None or not given.has_logits_processors or largest != -math.inf:
        return FinishReason.ERROR
    return FinishReason.STUCK if allowed is None or allowed.words.any() else allowed.why_none
