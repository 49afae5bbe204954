"""The workloads that have a name, and their definitions."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from loong.core.errors import ConfigError
from loong.workloads.distributions import fits
from loong.workloads.distributions.arrivals import Paced
from loong.workloads.distributions.laws import Beta, Law, Skewed, Zipf
from loong.workloads.distributions.sessions import agents, chats
from loong.workloads.request import RequestShape
from loong.workloads.source import Draw, in_blocks

FITS: Mapping[str, Draw] = {
    "sharegpt": fits.sharegpt,
    "lveval": fits.lveval,
    "mixed": fits.mixed,
    "victim-attacker": fits.victim_attacker,
}

SESSIONS: Mapping[str, Callable[[np.random.SeedSequence], Iterator[RequestShape]]] = {
    "agents": agents,
    "chats": chats,
}

# LoongServe's ablation of static and elastic parallelism has 10 to 200,000 tokens. Infinite-LLM's nine traces
# have the range, mean and standard deviation of its paper (arXiv 2401.02669), which gives no more of them.
# Six are betas. The first three have a small mean and a large deviation, so that a beta would draw one token
# nearly always: they are chats and a few documents.
LAWS: Mapping[str, Law] = {
    "zipf1.0": Zipf(1.0, 10, 200_000),
    "zipf1.2": Zipf(1.2, 10, 200_000),
    "zipf1.4": Zipf(1.4, 10, 200_000),
    "infinite-0": Skewed(1, 60_000, 1_233, 7_785.68),
    "infinite-1": Skewed(1, 60_000, 712, 5_531.4),
    "infinite-2": Skewed(1, 60_000, 469, 3_506.36),
    "infinite-3": Beta(1, 200_000, 56_362, 28_787.78),
    "infinite-4": Beta(1, 280_000, 75_650, 39_479.42),
    "infinite-5": Beta(1, 600_000, 160_239, 87_906.67),
    "infinite-6": Beta(1, 480_000, 128_804, 70_647.93),
    "infinite-7": Beta(1, 1_200_000, 293_945, 172_169.14),
    "infinite-8": Beta(1, 2_000_000, 498_609, 261_817.24),
}

NAMES = (*FITS, *SESSIONS, *LAWS)
OWN_PACES: Mapping[str, Paced] = {
    "victim-attacker": Paced(fits.VICTIMS_PER_SECOND, burstiness=float("inf")),
}


@dataclass(frozen=True, slots=True)
class Named:
    """One of `NAMES`."""

    name: str

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ConfigError(f"{self.name!r} is no workload; choose from {', '.join(NAMES)}")

    def __str__(self) -> str:
        return self.name

    def shapes(self, seed: np.random.SeedSequence) -> Iterator[RequestShape]:
        """Return shapes without end."""
        if self.name in LAWS:
            return LAWS[self.name].shapes(seed)
        if self.name in SESSIONS:
            return SESSIONS[self.name](seed)
        return in_blocks(FITS[self.name], seed)
