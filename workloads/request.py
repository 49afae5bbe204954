"""Requests of a load generator: prompts as seeded runs of tokens, and arrival times."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

NUM_SEEDS = 2**63
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
class AnswerRun:
    """The answer of an earlier turn in a prompt; its tokens are known when it has ended."""

    num_tokens: int


PromptRun: TypeAlias = TokenRun | AnswerRun


@dataclass(frozen=True, slots=True)
class Turn:
    """The place of a request in a session; `number` counts from 0.

    A turn after the first is due `think_time` seconds after the answer before it has ended.
    """

    session_id: int
    number: int
    num_turns: int
    think_time: float = 0.0

    @property
    def is_first(self) -> bool:
        """Return whether it waits for no answer."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Return whether no turn waits for its answer."""
        return self.number == self.num_turns - 1


@dataclass(frozen=True, slots=True)
class RequestShape:
    """The prompt and the length of the answer of one request, as a workload draws them.

    `user` is the request's user, as in the OpenAI API; "" if it has none. `turn` is None outside of sessions.
    The prompt of a later turn is the prompt of the turn before, its answer, and new runs. A workload yields
    the turns of a session one after the other.
    """

    prompt: tuple[PromptRun, ...]
    num_output_tokens: int
    user: str = ""
    turn: Turn | None = None

    @property
    def is_follower(self) -> bool:
        """Return whether it waits for the answer of the turn before."""
        return self.turn is not None and not self.turn.is_first

    @property
    def is_followed(self) -> bool:
        """Return whether a turn waits for its answer."""
        return self.turn is not None and not self.turn.is_last

    @property
    def think_time(self) -> float:
        """Return the seconds between the end of the answer before it and this request."""
        return 0.0 if self.turn is None else self.turn.think_time

    @property
    def new_runs(self) -> tuple[TokenRun, ...]:
        """Return the runs after the last answer in the prompt."""
        runs: list[TokenRun] = []
        for run in reversed(self.prompt):
            if isinstance(run, AnswerRun):
                break
            runs.append(run)
        return tuple(reversed(runs))

    def after(self, before: "RequestShape", num_answer_tokens: int) -> "RequestShape":
        """Return this turn as it follows the turn before, whose answer may be shorter than it should be."""
        return replace(self, prompt=(*before.prompt, AnswerRun(num_answer_tokens), *self.new_runs))

    def alone(self) -> "RequestShape":
        """Return the shape without its session; random tokens stand for the answers in its prompt."""
        if self.turn is None:
            return self
        first = self.turn.session_id
        runs = [
            TokenRun((first + index) % NUM_SEEDS, run.num_tokens) if isinstance(run, AnswerRun) else run
            for index, run in enumerate(self.prompt, 1)
        ]
        return replace(self, prompt=tuple(runs), turn=None)

    def scaled(self, length_scale: float, output_scale: float | None = None) -> "RequestShape":
        """Return the shape with every length multiplied, but not below the least that can be measured.

        Without an `output_scale` answers are multiplied as prompts are, and keep at least
        `MIN_SCALED_OUTPUT_TOKENS`.
        """
        if length_scale == 1 and output_scale is None:
            return self
        least = MIN_SCALED_OUTPUT_TOKENS if output_scale is None else MIN_OUTPUT_TOKENS

        def answer(num_tokens: int) -> int:
            return _scaled(num_tokens, length_scale if output_scale is None else output_scale, least)

        runs = [
            AnswerRun(answer(run.num_tokens))
            if isinstance(run, AnswerRun)
            else TokenRun(run.seed, _scaled(run.num_tokens, length_scale, MIN_PROMPT_TOKENS))
            for run in self.prompt
        ]
        return replace(self, prompt=tuple(runs), num_output_tokens=answer(self.num_output_tokens))

    def reseeded(self, offset: int) -> "RequestShape":
        """Return the shape with `offset` added to every seed: other tokens, shared as before."""
        runs = [
            run if isinstance(run, AnswerRun) else TokenRun(run.seed + offset, run.num_tokens)
            for run in self.prompt
        ]
        return replace(self, prompt=tuple(runs))


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """A request that is due `arrival_time` seconds after the run starts.

    A later turn of a session is due after the answer before it instead. Its `arrival_time` is then its place
    in the sequence of all arrivals, which gives the mean rate.
    """

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

    def prompt_token_ids(self, vocab_size: int, before: Sequence[int] = ()) -> list[int]:
        """Return the prompt, each id in `range(vocab_size)`.

        `before` has the prompt and the answer of the turn before. A turn that follows one needs it, or
        `ValueError` is raised.
        """
        if self.shape.is_follower and not before:
            raise ValueError(f"{self.shape.turn} follows a turn whose prompt and answer are not given")
        new = [token_id for run in self.shape.new_runs for token_id in run.token_ids(vocab_size)]
        return [*before, *new]


def _scaled(num_tokens: int, length_scale: float, least: int) -> int:
    return max(min(least, num_tokens), round(num_tokens * length_scale))
