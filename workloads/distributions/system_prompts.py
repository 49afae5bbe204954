"""The workloads of RelayAttention (ACL 2024): chats behind a system prompt, and questions of a benchmark."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from loong.core.errors import ConfigError
from loong.workloads.distributions import lengths
from loong.workloads.distributions.fits import chat_outputs, chat_prompts
from loong.workloads.request import RequestShape, TokenRun
from loong.workloads.source import in_blocks, new_seed

MOST_SYSTEM_TOKENS = 1_000_000
MOST_SHOTS = 5
NUM_TASKS, QUESTIONS_A_TASK = 57, 246  # 14,042 questions in all
FIVE_SHOTS = (379, 2_895)  # tokens, both included
QUESTIONS = (55, 1_219)
ANSWER_TOKENS = 32


@dataclass(frozen=True)
class SystemPrompt:
    """Chats with the lengths of `sharegpt` behind one system prompt of `prefix` tokens, the same for all.

    Given `input` and `output`, all have these lengths behind it.
    """

    name: ClassVar[str] = "system-prompt"

    prefix: int
    input: int | None = None
    output: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.prefix <= MOST_SYSTEM_TOKENS:
            raise ConfigError(f"PREFIX {self.prefix} is not from 1 to {MOST_SYSTEM_TOKENS} tokens")
        if (self.input is None) != (self.output is None):
            raise ConfigError(f"{self.name} has INPUT {self.input}, and needs OUTPUT as well")
        for word, given in (("INPUT", self.input), ("OUTPUT", self.output)):
            if given is not None and given < 1:
                raise ConfigError(f"{word} {given} is below 1 token")

    def __str__(self) -> str:
        given = (number for number in (self.prefix, self.input, self.output) if number is not None)
        return f"{self.name}({','.join(map(str, given))})"

    def shapes(self, seed: np.random.SeedSequence) -> Iterator[RequestShape]:
        """Return shapes without end."""
        [prompt_seed] = seed.spawn(1)
        system = TokenRun(new_seed(np.random.default_rng(prompt_seed)), self.prefix)
        return in_blocks(lambda rng, size: self._draw(rng, size, system), seed)

    def _draw(self, rng: np.random.Generator, size: int, system: TokenRun) -> list[RequestShape]:
        prompts, outputs = chat_prompts(rng, size), chat_outputs(rng, size)
        if self.input is not None and self.output is not None:
            prompts, outputs = np.full(size, self.input), np.full(size, self.output)
        return [
            RequestShape((system, TokenRun(new_seed(rng), int(prompt))), int(output))
            for prompt, output in zip(prompts, outputs, strict=True)
        ]


@dataclass(frozen=True)
class MMLULike:
    """Questions like those of MMLU with this many `shots`, task after task: 32 tokens out.

    The ranges are RelayAttention's: five shots have 379 to 2,895 tokens, the same ones for all questions of a
    task, and a question 55 to 1,219. A shot is a fifth of five. Both are log-normal in their range, our
    choice.
    """

    name: ClassVar[str] = "mmlu-like"

    shots: int = MOST_SHOTS

    def __post_init__(self) -> None:
        if not 0 <= self.shots <= MOST_SHOTS:
            raise ConfigError(f"SHOTS {self.shots} is not from 0 to {MOST_SHOTS}")

    def __str__(self) -> str:
        return self.name if self.shots == MOST_SHOTS else f"{self.name}({self.shots})"

    def shapes(self, seed: np.random.SeedSequence) -> Iterator[RequestShape]:
        """Return shapes without end."""
        return in_blocks(self._task, seed, QUESTIONS_A_TASK)

    def _task(self, rng: np.random.Generator, size: int) -> list[RequestShape]:
        low, high = FIVE_SHOTS
        [five] = lengths.log_normal(rng, 1, median=800, sigma=0.5, low=low, high=high).tolist()
        task = TokenRun(new_seed(rng), five * self.shots // MOST_SHOTS) if self.shots else None
        low, high = QUESTIONS
        asked = lengths.log_normal(rng, size, median=120, sigma=0.6, low=low, high=high).tolist()
        before = () if task is None else (task,)
        return [RequestShape((*before, TokenRun(new_seed(rng), number)), ANSWER_TOKENS) for number in asked]
