"""The record of one request, as its client saw it."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from loong.workloads.request import WorkloadRequest

CUT_OFF = "the run was cut off: too many had missed already"
TOO_LATE = "it had not ended when the run was over"


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Token counts as the server reports them.

    `num_cached_tokens` of the prompt were in its prefix cache; None if it does not say.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """Times are seconds after the start of the run; `error` is None exactly if the request succeeded.

    `due_time` is its arrival, or when a bound on concurrency let it go. `token_times` has one entry for each
    piece of the stream that carried output; a server may put several tokens into one piece. `request_id` is
    the server's, as far as it said.
    """

    request: WorkloadRequest
    due_time: float
    sent_time: float
    token_times: Sequence[float]
    finish_time: float
    usage: TokenUsage | None
    error: str | None
    request_id: str = ""

    @property
    def is_completed(self) -> bool:
        """Return whether the answer came to its regular end."""
        return self.error is None

    @property
    def has_ended(self) -> bool:
        """Return whether the server finished it, with or without success."""
        return self.error not in (CUT_OFF, TOO_LATE)

    @property
    def lateness(self) -> float:
        """Return the seconds that the load generator was late."""
        return self.sent_time - self.due_time

    @property
    def num_prompt_tokens(self) -> int:
        """Return the tokens as the server counts them, or as sent if it does not say."""
        return self.request.num_prompt_tokens if self.usage is None else self.usage.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        """Return the tokens as the server counts them, or the pieces of the stream if it does not say."""
        return len(self.token_times) if self.usage is None else self.usage.num_output_tokens

    @property
    def num_cached_tokens(self) -> int | None:
        """Return the tokens of the prompt that were in the server's prefix cache; None if it does not say."""
        return None if self.usage is None else self.usage.num_cached_tokens

    @property
    def ttft(self) -> float:
        """Return the seconds from sending to the first output of a completed request."""
        return self.token_times[0] - self.sent_time

    @property
    def e2el(self) -> float:
        """Return the seconds from sending to the last output of a completed request."""
        return self.token_times[-1] - self.sent_time

    @property
    def tpot(self) -> float | None:
        """Return the seconds per output token after the first; None for an answer of one token."""
        if self.num_output_tokens < 2:
            return None
        return (self.e2el - self.ttft) / (self.num_output_tokens - 1)

    @property
    def normalized(self) -> float:
        """Return E2EL per token of prompt and output."""
        return self.e2el / max(self.num_prompt_tokens + self.num_output_tokens, 1)

    @property
    def normalized_input(self) -> float:
        """Return TTFT per token of the prompt."""
        return self.ttft / max(self.num_prompt_tokens, 1)

    @property
    def normalized_output(self) -> float:
        """Return E2EL minus TTFT, per token of the output."""
        return (self.e2el - self.ttft) / max(self.num_output_tokens, 1)

    @property
    def itls(self) -> list[float]:
        """Return the seconds between consecutive pieces of the stream."""
        return [later - earlier for earlier, later in itertools.pairwise(self.token_times)]
