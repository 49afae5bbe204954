"""The workloads that have a name, and what each of them is."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from loong.core.errors import ConfigError
from loong.workloads import fits
from loong.workloads.arrivals import Paced
from loong.workloads.laws import Beta, Law, Zipf
from loong.workloads.request import RequestShape
from loong.workloads.source import Draw, in_blocks

FITS: Mapping[str, Draw] = {
    "sharegpt": fits.sharegpt,
    "leval": fits.leval,
    "lveval": fits.lveval,
    "mixed": fits.mixed,
    "victim-attacker": fits.victim_attacker,
}

# LoongServe's ablation of static and elastic parallelism has 10 to 200,000 tokens. Infinite-LLM's traces are
# named by their numbers in its paper (arXiv 2401.02669), of which range and mean are known here. Standard
# deviations as large as the means, as an exponential has, stand in for the published ones.
LAWS: Mapping[str, Law] = {
    "zipf1.0": Zipf(1.0, 10, 200_000),
    "zipf1.2": Zipf(1.2, 10, 200_000),
    "zipf1.4": Zipf(1.4, 10, 200_000),
    "infinite-0": Beta(1, 60_000, 1_233, 1_233),
    "infinite-1": Beta(1, 60_000, 712, 712),
    "infinite-2": Beta(1, 60_000, 469, 469),
    "infinite-3": Beta(1, 200_000, 56_000, 56_000),
    "infinite-8": Beta(1, 2_000_000, 499_000, 499_000),
}

NAMES = (*FITS, *LAWS)
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
        return in_blocks(FITS[self.name], seed)
