"""Service-level objectives: how soon a request of a given length must be answered.

Every rule is one formula: TTFT <= max(ttft, prefill_factor x unloaded prefill time), TPOT <= tpot,
E2EL <= e2el, and the like per token, all times a scale. Most rules judge each request, some a run's means.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from loong.core.errors import ConfigError
from loong.workloads.metrics.record import RequestRecord

PrefillTime = Callable[[int], float]
"""Returns the predicted seconds of an unloaded prefill of a number of tokens."""


@dataclass(frozen=True, slots=True)
class SLOLimits:
    """The bounds of one request; infinity where there is none.

    In seconds, the normalized ones in seconds per token, as records have them.
    """

    ttft: float
    tpot: float
    e2el: float
    normalized: float = math.inf
    normalized_input: float = math.inf
    normalized_output: float = math.inf

    def ratio(self, record: RequestRecord) -> float:
        """Return the greatest latency over its bound, so that at most 1 is within; infinity if it failed.

        An answer of one token has no TPOT to miss.
        """
        if not record.is_completed:
            return math.inf
        return max(
            record.ttft / self.ttft,
            (record.tpot or 0.0) / self.tpot,
            record.e2el / self.e2el,
            record.normalized / self.normalized,
            record.normalized_input / self.normalized_input,
            record.normalized_output / self.normalized_output,
        )

    def targets(self, num_prompt_tokens: int) -> tuple[float, float]:
        """Return the TTFT and the TPOT to plan for, in seconds. Bounds per token bound these, too."""
        ttft = self.normalized_input * max(1, num_prompt_tokens)
        return min(self.ttft, ttft), min(self.tpot, self.normalized_output)


LimitsOf = Callable[[int], SLOLimits]
"""The bounds of a request whose prompt has that many tokens."""


class Judged(Enum):
    """The basis of a rule: a run attains if enough of its requests do, or if its mean does."""

    EACH = "each"
    MEAN = "mean"


@dataclass(frozen=True, slots=True)
class SLORule:
    """Bounds as a function of prompt length; the module gives the formula. Times are in seconds."""

    name: str
    ttft: float = math.inf
    tpot: float = math.inf
    e2el: float = math.inf
    normalized: float = math.inf
    normalized_input: float = math.inf
    normalized_output: float = math.inf
    prefill_factor: float = 0.0
    judged: Judged = Judged.EACH
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.scale < math.inf:
            raise ConfigError(f"--slo-scale {self.scale:g} is not a number above 0")

    @property
    def needs_prefill_time(self) -> bool:
        """Return whether the bounds depend on the time of an unloaded prefill."""
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
        return SLOLimits(
            ttft * self.scale,
            self.tpot * self.scale,
            self.e2el * self.scale,
            self.normalized * self.scale,
            self.normalized_input * self.scale,
            self.normalized_output * self.scale,
        )

    def limits_of(self, prefill_time: PrefillTime | None) -> LimitsOf:
        """Return the bounds as a function of prompt length alone."""
        return lambda num_prompt_tokens: self.limits(num_prompt_tokens, prefill_time)

    def describe(self) -> str:
        """Return the name and the bounds, for a report."""
        bounds = []
        if self.needs_prefill_time:
            bounds.append(f"TTFT <= max({self.prefill_factor:g} x unloaded prefill, {self.ttft:g} s)")
        elif self.ttft < math.inf:
            bounds.append(f"TTFT <= {self.ttft * 1e3:g} ms")
        for what, bound in (
            ("TPOT", self.tpot),
            ("E2EL", self.e2el),
            ("E2EL per token", self.normalized),
            ("TTFT per prompt token", self.normalized_input),
            ("the rest per output token", self.normalized_output),
        ):
            if bound < math.inf:
                bounds.append(f"{what} <= {bound * 1e3:g} ms")
        scale = "" if self.scale == 1 else f", all x {self.scale:g}"
        judged = "means of the run: " if self.judged is Judged.MEAN else ""
        return f"{self.name} ({judged}{', '.join(bounds)}{scale})"


def _means(workload: str, total_ms: float, input_ms: float, output_ms: float) -> SLORule:
    return SLORule(
        f"{MEANS_RULE}-{workload}",
        normalized=total_ms / 1e3,
        normalized_input=input_ms / 1e3,
        normalized_output=output_ms / 1e3,
        judged=Judged.MEAN,
    )


MEANS_RULE = "loongserve-10"
# `interactive` is for chats and coding agents, at 65 tokens a second or more.
# LoongServe's evaluation: 25 times the unloaded prefill, never under 15 s, for nine in ten (its figure 12),
# and means under a bound in ms a token, by workload (its figure 10).
# MLPerf Inference's server scenarios of Llama-3.1-8B, for 99 in 100.
NAMED_RULES = {
    rule.name: rule
    for rule in (
        SLORule("tight", ttft=1.0, tpot=0.050, prefill_factor=5.0),
        SLORule("interactive", ttft=0.5, tpot=0.015, prefill_factor=3.0),
        SLORule("loongserve-12", ttft=15.0, tpot=0.050, prefill_factor=25.0),
        SLORule("mlperf-8b", ttft=2.0, tpot=0.100),
        SLORule("mlperf-8b-interactive", ttft=0.5, tpot=0.030),
        _means("sharegpt", 92, 20, 320),
        _means("leval", 3.5, 1.8, 320),
        _means("lveval", 2.5, 2.5, 365),
        _means("mixed", 70, 90, 360),
    )
}
RULE_NAMES = tuple(
    name for name in (*NAMED_RULES, MEANS_RULE) if not name.startswith(f"{MEANS_RULE}-")
)  # as users see them
FACTOR = "factor"  # multiple of the unloaded prefill; other bounds are in ms

_METRICS = ("ttft", "tpot", "e2el")
_BOUND = re.compile(r"([a-z0-9]+):([0-9]+(?:\.[0-9]+)?)")


def parse_slo(text: str, *, scale: float = 1.0, workload: str = "") -> SLORule:
    """Read a rule's name, or bounds in milliseconds such as `ttft:2000 tpot:50`.

    `tight,tpot:10` is a rule with other targets: `tpot` and `e2el` in ms, `ttft` the least TTFT bound in ms,
    `factor` the multiple of the unloaded prefill. `loongserve-10` alone is the one for `workload`, a name or
    a spec that begins with one.

    Raises:
        ConfigError: an unknown name, metric or number, a metric given twice, or a scale not above 0.
    """
    name, comma, targets = text.partition(",")
    if name == MEANS_RULE:
        name = f"{MEANS_RULE}-{workload.partition('@')[0]}"
    if name in NAMED_RULES:
        rule = replace(NAMED_RULES[name], scale=scale)
        return _varied(rule, targets, text) if comma else rule
    if text == MEANS_RULE:
        named = ", ".join(name for name in NAMED_RULES if name.startswith(MEANS_RULE))
        raise ConfigError(f"SLO {text} has no bounds for workload {workload!r}; name one of {named}")
    return SLORule("absolute", **_bounds(text), judged=Judged.EACH, scale=scale)


def _varied(rule: SLORule, targets: str, text: str) -> SLORule:
    """Return a rule with some of its targets replaced, named by the text that says so."""
    if rule.judged is Judged.MEAN:
        raise ConfigError(f"SLO {text!r} changes targets of {rule.name}, which judges the means of a run")
    parts = targets.split(",")
    factors = [part for part in parts if part.partition(":")[0] == FACTOR]
    bounds = [part for part in parts if part not in factors]
    if len(factors) > 1:
        raise ConfigError(f"SLO {text!r} gives {FACTOR} twice")
    changed = _bounds(" ".join(bounds)) if bounds else {}
    for part in factors:
        match = _BOUND.fullmatch(part)
        if match is None or not float(match[2]) > 0:
            raise ConfigError(f"SLO {part!r} is no {FACTOR} above 0, such as {FACTOR}:3")
        rule = replace(rule, prefill_factor=float(match[2]))
    return replace(
        rule,
        name=text,
        ttft=changed.get("ttft", rule.ttft),
        tpot=changed.get("tpot", rule.tpot),
        e2el=changed.get("e2el", rule.e2el),
    )


def _bounds(text: str) -> dict[str, float]:
    bounds: dict[str, float] = {}
    for part in text.split():
        match = _BOUND.fullmatch(part)
        if match is None:
            raise ConfigError(
                f"SLO {part!r} is neither a rule ({', '.join(RULE_NAMES)}) nor bounds in ms such as "
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
        raise ConfigError(f"SLO is empty; give {', '.join(RULE_NAMES)} or bounds such as 'ttft:2000 tpot:50'")
    return bounds
