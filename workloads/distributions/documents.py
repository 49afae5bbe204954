"""Questions on long documents: several requests in a row share a document."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from loong.core.errors import ConfigError
from loong.workloads.distributions.fits import LEVAL_QUESTIONS_PER_DOCUMENT, leval
from loong.workloads.request import RequestShape
from loong.workloads.source import SHAPES_AT_ONCE, in_blocks

MOST_QUESTIONS = 1_000


@dataclass(frozen=True)
class LEval:
    """Documents of L-Eval with this many `questions` each; see `fits.leval`."""

    name: ClassVar[str] = "leval"

    questions: int = LEVAL_QUESTIONS_PER_DOCUMENT

    def __post_init__(self) -> None:
        if not 1 <= self.questions <= MOST_QUESTIONS:
            raise ConfigError(f"QUESTIONS {self.questions} is not from 1 to {MOST_QUESTIONS} a document")

    def __str__(self) -> str:
        if self.questions == LEVAL_QUESTIONS_PER_DOCUMENT:
            return self.name
        return f"{self.name}({self.questions})"

    def shapes(self, seed: np.random.SeedSequence) -> Iterator[RequestShape]:
        """Return shapes without end."""
        num_documents = max(1, SHAPES_AT_ONCE // self.questions)
        return in_blocks(
            lambda rng, size: leval(rng, size, self.questions), seed, num_documents * self.questions
        )
