"""The outputs of `LLM`, by vLLM's names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log probability of a token at a position. `rank` counts from 1, the likeliest; None: unknown."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice of a request.

    `logprobs` have the likeliest tokens at each position and the chosen one, by id. `stop_reason` is the
    stop string or token of the request that ended the output, if one did.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: Sequence[Mapping[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Return whether it has ended, which all outputs of `LLM` have."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt with its choices. `prompt` is None where token ids were given.

    `prompt_logprobs` begin with None, because nothing comes before the first token.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: Sequence[CompletionOutput]
    prompt_logprobs: Sequence[Mapping[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    finished: bool = True
