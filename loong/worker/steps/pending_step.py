"""A step that the device was given, until its tokens are there."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from loong.core.events import ProducedToken
from loong.core.prompt_logprobs import PromptLogprobs
from loong.core.request import RequestId
from loong.model.device import Device
from loong.worker.backend import Reading
from loong.worker.sampling.grammar_constraints import Constraints
from loong.worker.sampling.lease_sampling import why_invalid
from loong.worker.sampling.sampler import InvalidLogits, SampledTokens
from loong.worker.sampling.sampling_input import SamplingInput
from loong.worker.steps.prompt_scores import PendingScores
from loong.worker.steps.step_inputs import PendingTokenIds, Progress


class SampledRow(NamedTuple):
    """The request that gets the token of a row; `progress` is None for a sibling."""

    request_id: RequestId
    given: SamplingInput
    progress: Progress | None


class PendingStep:
    """A step whose tokens the device samples, after its earlier work."""

    def __init__(
        self,
        rows: Sequence[SampledRow],
        choice: SampledTokens | None,
        reading: Reading,
        device: Device,
        constraints: Constraints,
        scores: PendingScores | None = None,
    ) -> None:
        """Take the rows, and their tokens that are being read; None if no row gets a token.

        The scores of prompts, if any are wanted, are there when the tokens are.
        """
        self._rows, self._sampled, self._reading = rows, choice, reading
        self._device, self._constraints, self._scores = device, constraints, scores
        self.sources: Mapping[RequestId, int] = {row.request_id: i for i, row in enumerate(rows)}

    def is_done(self) -> bool:
        """Return whether the device is done, so that reading the tokens does not wait."""
        return self._reading.is_done()

    def pending_token_ids(self, rows: Mapping[RequestId, int]) -> PendingTokenIds | None:
        """Return the tokens drawn for these rows of a later step; None if there are none."""
        if self._sampled is None or not rows:
            return None
        places = torch.tensor([[*rows.values()], [self.sources[i] for i in rows]], dtype=torch.int64)
        return PendingTokenIds(self._sampled.tokens, self._device.upload(places))

    def tokens(self) -> tuple[ProducedToken, ...]:
        """Wait for the tokens and return them; callable once."""
        read = self._reading.wait()  # also without tokens: the end of the step means that the device is done
        results = () if self._sampled is None else self._sampled.results(read)
        tokens = []
        for (request_id, given, progress), result in zip(self._rows, results, strict=True):
            if isinstance(result, InvalidLogits):
                tokens.append(ProducedToken(request_id, 0, why_invalid(given, given.allowed, result.largest)))
                continue
            params = given.params
            if progress is not None:
                assert progress.given.sampling_params is not None, "it is sampled"
                params = progress.given.sampling_params  # which the previous token may have changed
                progress.new_token_ids.append(result.token_id)
            reason = params.finish_reason(given.num_output_tokens + 1, result.token_id)
            if reason is not None:
                self._constraints.forget(request_id)
            tokens.append(ProducedToken(request_id, result.token_id, reason, result.logprobs))
        return tuple(tokens)

    def prompt_logprobs(self) -> tuple[PromptLogprobs, ...]:
        """Wait for the log probabilities of prompts and return them; callable once."""
        return () if self._scores is None else self._scores.results()
