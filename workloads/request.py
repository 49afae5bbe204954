"""Requests of a load generator: prompts as seeded runs of tokens, and arrival times."""

from dataclasses import dataclass

import numpy as np

MIN_PROMPT_TOKENS = 4
SMALLEST_VOCABULARY = 256  # ids below it are in every model's vocabulary, byte-level ones included
MIN_OUTPUT_TOKENS = 2  # one token has no time per output token
MIN_SCALED_OUTPUT_TOKENS = 16  # of fewer, the time per output token is mostly noise


@dataclass(frozen=True, slots=True)
class TokenRun:
    """`num_tokens` random token ids, the same ones for the same seed.

    Of two runs with one seed, the shorter is a prefix of the longer. So prompts share a prefix exactly when
    their first runs have one seed. A million-token prompt takes two numbers.
    """

    seed: int
    num_tokens: int

    def token_ids(self, vocab_size: int) -> list[int]:
        """Return the ids, each in `range(vocab_size)`."""
        ids: list[int] = np.random.default_rng(self.seed).integers(vocab_size, size=self.num_tokens).tolist()
        return ids


@dataclass(frozen=True, slots=True)
class RequestShape:
    """The prompt and the length of the answer of one request, as a workload draws them.

    `user` is the request's user, as in the OpenAI API; "" if it has none.
    """

    prompt: tuple[TokenRun, ...]
    num_output_tokens: int
    user: str = ""

    def scaled(self, length_scale: float, output_scale: float | None = None) -> "RequestShape":
        """Return the shape with every length multiplied, but not below the least that can be measured.

        Without an `output_scale` answers are multiplied as prompts are, and keep at least
        `MIN_SCALED_OUTPUT_TOKENS`.
        """
        least = MIN_SCALED_OUTPUT_TOKENS if output_scale is None else MIN_OUTPUT_TOKENS
        return RequestShape(
            tuple(
                TokenRun(run.seed, _scaled(run.num_tokens, length_scale, MIN_PROMPT_TOKENS))
                for run in self.prompt
            ),
            _scaled(self.num_output_tokens, length_scale if output_scale is None else output_scale, least),
            self.user,
        )

    def reseeded(self, offset: int) -> "RequestShape":
        """Return the shape with `offset` added to every seed: other tokens, shared as before."""
        runs = tuple(TokenRun(run.seed + offset, run.num_tokens) for run in self.prompt)
        return RequestShape(runs, self.num_output_tokens, self.user)


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """A request that is due `arrival_time` seconds after the run starts."""

    arrival_time: float
    shape: RequestShape

    @property
    def num_prompt_tokens(self) -> int:
        """Return the tokens of all runs of the prompt."""
        return sum(run.num_tokens for run in self.shape.prompt)

    @property
    def num_output_tokens(self) -> int:
        """Return the tokens that the answer must have: the request ignores the end-of-sequence token."""
        return self.shape.num_output_tokens

    def prompt_token_ids(self, vocab_size: int) -> list[int]:
        """Return the prompt, each id in `range(vocab_size)`."""
        return [token_id for run in self.shape.prompt for token_id in run.token_ids(vocab_size)]


def _scaled(num_tokens: int, length_scale: float, least: int) -> int:
    return max(min(least, num_tokens), round(num_tokens * length_scale))
