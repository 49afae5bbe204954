"""Requests of several sources, in random order."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import TypeAlias

import numpy as np

from loong.core.errors import ConfigError
from loong.workloads.data_file import DataFile
from loong.workloads.distributions.documents import LEval
from loong.workloads.distributions.laws import Law
from loong.workloads.distributions.numerals import numeral
from loong.workloads.distributions.shared_prefix import SharedPrefix
from loong.workloads.distributions.system_prompts import MMLULike, SystemPrompt
from loong.workloads.named import Named
from loong.workloads.request import RequestShape
from loong.workloads.source import SHAPES_AT_ONCE

Single: TypeAlias = Named | LEval | Law | SharedPrefix | SystemPrompt | MMLULike | DataFile


@dataclass(frozen=True, slots=True)
class Mix:
    """At least two sources. A request is from a source with a probability in proportion to its weight.

    The turns of a session count as one. A mix ends when a source has no request left that is due.
    """

    parts: tuple[tuple[float, Single], ...]

    def __post_init__(self) -> None:
        if len(self.parts) < 2:
            raise ConfigError("a mix has at least two sources")
        for weight, source in self.parts:
            if not 0 < weight < math.inf:
                raise ConfigError(f"the weight {weight:g} of {source} is not above 0")

    def __str__(self) -> str:
        return "+".join(f"{numeral(weight)}*{source}" for weight, source in self.parts)

    def shapes(self, seed: np.random.SeedSequence) -> Iterator[RequestShape]:
        """Return shapes; those of one source are in its own order."""
        order_seed, *source_seeds = seed.spawn(1 + len(self.parts))
        rng = np.random.default_rng(order_seed)
        weights = np.array([weight for weight, _ in self.parts])
        sources = [
            source.shapes(source_seed)
            for (_, source), source_seed in zip(self.parts, source_seeds, strict=True)
        ]
        for _ in repeat(None):
            for index in rng.choice(len(sources), size=SHAPES_AT_ONCE, p=weights / weights.sum()):
                shape = next(sources[index], None)
                if shape is None:
                    return
                yield shape
                while shape.is_followed and (shape := next(sources[index], None)) is not None:
                    yield shape
