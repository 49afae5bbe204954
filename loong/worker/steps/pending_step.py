"""A step that the device was asked for, until its tokens are there."""

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
    """Who gets a token by a row; `progress` is None for a sibling."""

    request_id: RequestId
    given: SamplingInput
    progress: Progress | None


class PendingStep:
    """A step whose tokens the device draws, after all that it was asked for before."""

    def __init__(
        self,
        rows: Sequence[SampledRow],
        choice: SampledTokens | None,
        reading: Reading,
        device: Device,
        constraints: Constraints,
        scores: PendingScores | None = None,
    ) -> None:
        """Take who gets what was chosen, which is None if nobody gets anything, and is being read.

        What is found of prompts, if anything is asked of them, is there by then.
        """
        self._rows, self._sampled, self._reading = rows, choice, reading
        self._device, self._constraints, self._scores = device, constraints, scores
        self.sources: Mapping[RequestId, int] = {row.request_id: i for i, row in enumerate(rows)}

    def is_done(self) -> bool:
        """Whether the device is, so that nobody waits for the tokens."""
        return self._reading.is_done()

    def pending_token_ids(self, rows: Mapping[RequestId, int]) -> PendingTokenIds | None:
        """The tokens drawn for these requests, for these rows of a step to come; None if there are none."""
        if self._sampled is None or not rows:
            return None
        places = torch.tensor([[*rows.values()], [self.sources[i] for i in rows]], dtype=torch.int64)
        return PendingTokenIds(self._sampled.tokens, self._device.upload(places))

    def tokens(self) -> tuple[ProducedToken, ...]:
        """Wait for the tokens; once."""
        read = self._reading.wait()  # even if nobody gets one: what is told to be done is done
        results = () if self._sampled is None else self._sampled.results(read)
        tokens = []
        for (request_id, given, progress), result in zip(self._rows, results, strict=True):
            if isinstance(result, InvalidLogits):
                tokens.append(ProducedToken(request_id, 0, why_invalid(given.allowed)))
                continue
            params = given.params
            if progress is not None:
                assert progress.given.sampling_params is not None, "it is sampled"
                params = progress.given.sampling_params  # which the token before may have changed meanwhile
                progress.new_token_ids.append(result.token_id)
            reason = params.finish_reason(given.num_output_tokens + 1, result.token_id)
            if reason is not None:
                self._constraints.forget(request_id)
            tokens.append(ProducedToken(request_id, result.token_id, reason, result.logprobs))
        return tuple(tokens)

    def prompt_logprobs(self) -> tuple[PromptLogprobs, ...]:
        """Wait for what is found of prompts; once."""
        return () if self._scores is None else self._scores.results()
