"""Service-level objectives: how soon a request of a given length must be answered.

Every rule is one formula: TTFT <= max(ttft, prefill_factor x unloaded prefill time), TPOT <= tpot,
E2EL <= e2el, all times a scale.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from loong.core.errors import ConfigError

PrefillTime = Callable[[int], float]
"""Predicted seconds of an unloaded prefill of so many tokens."""


@dataclass(frozen=True, slots=True)
class SLOLimits:
    """The bounds of one request, in seconds; infinity where there is none."""

    ttft: float
    tpot: float
    e2el: float

    def are_met(self, *, ttft: float, tpot: float | None, e2el: float) -> bool:
        """Whether a finished request kept every bound; an answer of one token has no TPOT to miss."""
        return ttft <= self.ttft and (tpot is None or tpot <= self.tpot) and e2el <= self.e2el


LimitsOf = Callable[[int], SLOLimits]
"""The bounds of a request whose prompt has that many tokens."""


@dataclass(frozen=True, slots=True)
class SLORule:
    """Bounds as a function of prompt length; the module gives the formula. Times are in seconds."""

    name: str
    ttft: float = math.inf
    tpot: float = math.inf
    e2el: float = math.inf
    prefill_factor: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.scale < math.inf:
            raise ConfigError(f"--slo-scale {self.scale:g} is not a number above 0")

    @property
    def needs_prefill_time(self) -> bool:
        """Whether the bounds depend on how long an unloaded prefill takes."""
        return self.prefill_factor > 0

    def limits(self, num_prompt_tokens: int, prefill_time: PrefillTime | None = None) -> SLOLimits:
        """Return the bounds of a request with a prompt of that length.

        Raises:
            ValueError: the rule needs a prefill time and none is given.
        """
        ttft = self.ttft
        if self.needs_prefill_time:
            if prefill_time is None:
                raise ValueError(f"SLO {self.name} depends on the time of an unloaded prefill")
            ttft = max(ttft, self.prefill_factor * prefill_time(num_prompt_tokens))
        return SLOLimits(ttft * self.scale, self.tpot * self.scale, self.e2el * self.scale)

    def limits_of(self, prefill_time: PrefillTime | None) -> LimitsOf:
        """Return the bounds as a function of prompt length alone."""
        return lambda num_prompt_tokens: self.limits(num_prompt_tokens, prefill_time)

    def describe(self) -> str:
        """Return the name and what it asks, for a report."""
        bounds = []
        if self.needs_prefill_time:
            bounds.append(f"TTFT <= max({self.prefill_factor:g} x unloaded prefill, {self.ttft:g} s)")
        elif self.ttft < math.inf:
            bounds.append(f"TTFT <= {self.ttft * 1e3:g} ms")
        if self.tpot < math.inf:
            bounds.append(f"TPOT <= {self.tpot * 1e3:g} ms")
        if self.e2el < math.inf:
            bounds.append(f"E2EL <= {self.e2el * 1e3:g} ms")
        scale = "" if self.scale == 1 else f", all x {self.scale:g}"
        return f"{self.name} ({', '.join(bounds)}{scale})"


NAMED_RULES = {
    # LoongServe's evaluation: 25 times the unloaded prefill, never under 15 s.
    "loongserve-12": SLORule("loongserve-12", ttft=15.0, tpot=0.050, prefill_factor=25.0),
    "tight": SLORule("tight", ttft=1.0, tpot=0.050, prefill_factor=5.0),
}

_METRICS = ("ttft", "tpot", "e2el")
_BOUND = re.compile(r"([a-z0-9]+):([0-9]+(?:\.[0-9]+)?)")


def parse_slo(text: str, *, scale: float = 1.0) -> SLORule:
    """Read a rule's name, or bounds in milliseconds such as `ttft:2000 tpot:50`.

    Raises:
        ConfigError: an unknown name, metric or number, a metric given twice, or a scale not above 0.
    """
    if text in NAMED_RULES:
        return replace(NAMED_RULES[text], scale=scale)
    bounds: dict[str, float] = {}
    for part in text.split():
        match = _BOUND.fullmatch(part)
        if match is None:
            raise ConfigError(
                f"SLO {part!r} is neither a rule ({', '.join(NAMED_RULES)}) nor bounds in ms such as "
                "'ttft:2000 tpot:50'"
            )
        metric, milliseconds = match[1], float(match[2])
        if metric not in _METRICS:
            raise ConfigError(f"SLO {part!r} bounds {metric!r}; the metrics are {', '.join(_METRICS)}")
        if metric in bounds:
            raise ConfigError(f"SLO {text!r} bounds {metric} twice")
        if milliseconds <= 0:
            raise ConfigError(f"SLO {part!r} is not above 0 ms")
        bounds[metric] = milliseconds / 1e3
    if not bounds:
        raise ConfigError(
            f"SLO is empty; give {', '.join(NAMED_RULES)} or bounds such as 'ttft:2000 tpot:50'"
        )
    return SLORule("absolute", scale=scale, **bounds)
