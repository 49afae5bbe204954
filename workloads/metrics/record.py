"""What became of one request, as its client saw it."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from loong.workloads.request import WorkloadRequest

CUT_OFF = "the run was cut off: too many had missed already"
TOO_LATE = "it had not ended when the run was over"


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Token counts as the server reports them."""

    num_prompt_tokens: int
    num_output_tokens: int


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
        """Whether the answer came to its regular end."""
        return self.error is None

    @property
    def has_ended(self) -> bool:
        """Whether the server was done with it, with success or without."""
        return self.error not in (CUT_OFF, TOO_LATE)

    @property
    def lateness(self) -> float:
        """Seconds the generator itself was behind."""
        return self.sent_time - self.due_time

    @property
    def num_prompt_tokens(self) -> int:
        """As the server counts, or as sent where it does not say."""
        return self.request.num_prompt_tokens if self.usage is None else self.usage.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        """As the server counts, or the pieces of the stream where it does not say."""
        return len(self.token_times) if self.usage is None else self.usage.num_output_tokens

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first output of a completed request."""
        return self.token_times[0] - self.sent_time

    @property
    def e2el(self) -> float:
        """Seconds from sending to the last output of a completed request."""
        return self.token_times[-1] - self.sent_time

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None for an answer of one token."""
        if self.num_output_tokens < 2:
            return None
        return (self.e2el - self.ttft) / (self.num_output_tokens - 1)

    @property
    def normalized(self) -> float:
        """E2EL per token of prompt and output."""
        return self.e2el / max(self.num_prompt_tokens + self.num_output_tokens, 1)

    @property
    def normalized_input(self) -> float:
        """TTFT per token of the prompt."""
        return self.ttft / max(self.num_prompt_tokens, 1)

    @property
    def normalized_output(self) -> float:
        """What E2EL has beyond TTFT, per token of the output."""
        return (self.e2el - self.ttft) / max(self.num_output_tokens, 1)

    @property
    def itls(self) -> list[float]:
        """Seconds between consecutive pieces of the stream."""
        return [later - earlier for earlier, later in itertools.pairwise(self.token_times)]
