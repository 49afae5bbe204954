"""Laws of prompt lengths that a spec may write with its own numbers, such as `zipf(1.2,10,200000)`."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import ClassVar

import numpy as np

from loong.core.errors import ConfigError
from loong.workloads.distributions import lengths
from loong.workloads.distributions.fits import CHAT_MEDIAN, CHAT_SIGMA, MAX_SHAREGPT_PROMPT, answers
from loong.workloads.distributions.lengths import Lengths
from loong.workloads.distributions.moments import Documents, Moments, documents_beside
from loong.workloads.distributions.numerals import numeral
from loong.workloads.request import RequestShape
from loong.workloads.source import in_blocks, private_prompts

LONGEST = 10_000_000  # tokens of a prompt or an answer
LEAST_MASS = 0.01  # of a log-normal, inside its bounds: with less, drawing until one fits takes long


@dataclass(frozen=True)
class Law(ABC):
    """Prompts of drawn lengths without shared prefixes.

    A class's fields are the numbers of its spec, in order.

    The last number is `output`, the tokens of every answer; None draws them, as `answers` does.

    Raises:
        ConfigError: a number that is no valid length.
    """

    name: ClassVar[str]

    output: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.output is not None:
            _check_tokens("OUTPUT", self.output)

    def __str__(self) -> str:
        own = [getattr(self, each.name) for each in fields(self) if not each.kw_only]
        numbers = own if self.output is None else [*own, self.output]
        return f"{self.name}({','.join(map(numeral, numbers))})"

    def shapes(self, seed: np.random.SeedSequence) -> Iterator[RequestShape]:
        """Return shapes without end."""
        return in_blocks(self._draw, seed)

    def _draw(self, rng: np.random.Generator, num_requests: int) -> list[RequestShape]:
        prompts = self._lengths(rng, num_requests)
        outputs = answers(rng, prompts) if self.output is None else np.full(num_requests, self.output)
        return private_prompts(rng, prompts, outputs)

    @abstractmethod
    def _lengths(self, rng: np.random.Generator, size: int, /) -> Lengths: ...


@dataclass(frozen=True)
class Fixed(Law):
    """Prompts of one length."""

    name = "fixed"

    input: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_tokens("INPUT", self.input)

    def _lengths(self, _rng: np.random.Generator, size: int) -> Lengths:
        return np.full(size, self.input)


@dataclass(frozen=True)
class Uniform(Law):
    """All lengths in [low, high] are equally likely."""

    name = "uniform"

    low: int
    high: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_range(self.low, self.high)

    def _lengths(self, rng: np.random.Generator, size: int) -> Lengths:
        return lengths.uniform(rng, size, low=self.low, high=self.high)


@dataclass(frozen=True)
class LogNormal(Law):
    """A log-normal of this median and of this sigma of its logarithm, cut to [low, high]."""

    name = "lognormal"

    median: float
    sigma: float
    low: int
    high: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_range(self.low, self.high)
        for name, number in (("MEDIAN", self.median), ("SIGMA", self.sigma)):
            if not 0 < number < math.inf:
                raise ConfigError(f"{name} {number:g} is not above 0")
        if self._mass() < LEAST_MASS:
            raise ConfigError(
                f"of a log-normal of MEDIAN {self.median:g} and SIGMA {self.sigma:g}, less than "
                f"{LEAST_MASS:.0%} is between LOW {self.low} and HIGH {self.high}"
            )

    def _mass(self) -> float:
        below = [
            math.erf(math.log(bound / self.median) / self.sigma / math.sqrt(2))
            for bound in (self.low - 0.5, self.high + 0.5)
        ]
        return (below[1] - below[0]) / 2

    def _lengths(self, rng: np.random.Generator, size: int) -> Lengths:
        return lengths.log_normal(
            rng, size, median=self.median, sigma=self.sigma, low=self.low, high=self.high
        )


@dataclass(frozen=True)
class Zipf(Law):
    """Lengths x in [low, high] with weight 1 / x^alpha: for alpha 0 uniform, and ever shorter beyond."""

    name = "zipf"

    alpha: float
    low: int
    high: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_range(self.low, self.high)
        if not 0 <= self.alpha <= 10:
            raise ConfigError(f"ALPHA {self.alpha:g} is not from 0 to 10")

    def _lengths(self, rng: np.random.Generator, size: int) -> Lengths:
        return lengths.zipf(rng, size, alpha=self.alpha, offset=0.0, low=self.low, high=self.high)


@dataclass(frozen=True)
class Beta(Law):
    """The beta distribution on [low, high] with this mean and standard deviation."""

    name = "beta"

    low: int
    high: int
    mean: float
    sd: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_range(self.low, self.high)
        if not self.low < self.mean < self.high:
            raise ConfigError(f"MEAN {self.mean:g} is not between LOW {self.low} and HIGH {self.high}")
        most = math.sqrt((self.mean - self.low) * (self.high - self.mean))
        if not most / 1000 <= self.sd <= most * 0.999:
            allowed = f"from {most / 1000:.4g} to {most * 0.999:.4g}"
            raise ConfigError(f"SD {self.sd:g} is not {allowed}, which this range and mean allow")

    def _lengths(self, rng: np.random.Generator, size: int) -> Lengths:
        return lengths.beta(rng, size, low=self.low, high=self.high, mean=self.mean, sd=self.sd)


@dataclass(frozen=True)
class Skewed(Law):
    """Chats and a few documents that together have this mean and standard deviation.

    A beta distribution with a mean that is small relative to its deviation draws one token nearly always.
    This law has no such heap. Chats are ShareGPT's log-normal cut to [low, 2300]. Documents are log-uniform
    on [L, high]. Their share and L are solved for the mean and the standard deviation.
    """

    name = "skewed"

    low: int
    high: int
    mean: float
    sd: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_range(self.low, MAX_SHAREGPT_PROMPT)
        _check_range(MAX_SHAREGPT_PROMPT, self.high)
        _ = self._documents  # which raises what cannot be

    @cached_property
    def _documents(self) -> Documents:
        chats = Moments.of_log_normal(CHAT_MEDIAN, CHAT_SIGMA, self.low, MAX_SHAREGPT_PROMPT)
        return documents_beside(chats, MAX_SHAREGPT_PROMPT, self.high, Moments.of(self.mean, self.sd))

    def _lengths(self, rng: np.random.Generator, size: int) -> Lengths:
        chats = lengths.log_normal(
            rng, size, median=CHAT_MEDIAN, sigma=CHAT_SIGMA, low=self.low, high=MAX_SHAREGPT_PROMPT
        )
        documents = lengths.log_uniform(rng, size, low=self._documents.low, high=self.high)
        return np.where(rng.random(size) < self._documents.share, documents, chats)


LAWS: tuple[type[Law], ...] = (Fixed, Uniform, LogNormal, Zipf, Beta, Skewed)


def _check_range(low: int, high: int) -> None:
    _check_tokens("LOW", low)
    _check_tokens("HIGH", high)
    if low > high:
        raise ConfigError(f"LOW {low} is above HIGH {high}")


def _check_tokens(name: str, value: int) -> None:
    if not 1 <= value <= LONGEST:
        raise ConfigError(f"{name} {value} is not from 1 to {LONGEST} tokens")
