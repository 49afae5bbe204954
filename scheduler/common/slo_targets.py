"""Times at which tokens are due: by a request's own targets, or else the config's."""

from collections.abc import Iterable
from math import inf

from loong.core.cost.cost_model import PrefillTerms
from loong.core.request import RequestView
from loong.scheduler.config import PolicyConfig


class FirstTokenTargets:
    """Seconds to first tokens, where the fastest prefill is that of `widest`."""

    def __init__(self, widest: PrefillTerms, config: PolicyConfig) -> None:
        self._config = config
        self._widest, self._defaults = widest, dict[int, float]()  # by tokens
        seconds = config.target_ttft / config.ttft_factor
        self._num_usual = widest.max_tokens(seconds, 0) if seconds < inf else inf

    def of(self, view: RequestView) -> float:
        """Return its own target, or else the default. Each step of priority doubles it, or halves it."""
        ttft = None if view.slo is None else view.slo.ttft
        if ttft is None and view.num_prompt_tokens <= self._num_usual:  # most prompts: no need to compute
            ttft = self._config.target_ttft
        elif ttft is None:
            ttft = self._default(view.num_prompt_tokens)
        return ttft * 2.0**view.priority if view.priority else ttft

    def _default(self, num_tokens: int) -> float:
        if num_tokens not in self._defaults:
            self._defaults[num_tokens] = default_ttft(num_tokens, self._widest, self._config)
        return self._defaults[num_tokens]


def default_ttft(num_tokens: int, widest: PrefillTerms, config: PolicyConfig) -> float:
    """Return the target of a prompt of `num_tokens` tokens without its own.

    It is a multiple of the fastest prefill, and at least `target_ttft`.
    """
    return max(config.target_ttft, config.ttft_factor * widest.time(num_tokens, 0, num_tokens * num_tokens))


def target_tpot(view: RequestView, config: PolicyConfig) -> float:
    """Return its own target, or else the config's."""
    tpot = None if view.slo is None else view.slo.tpot
    return config.target_tpot if tpot is None else tpot


def tightest_tpot(views: Iterable[RequestView], config: PolicyConfig) -> float:
    """Return the least TPOT target of these requests; the config's if there are none."""
    own = {None if view.slo is None else view.slo.tpot for view in views}
    return min([config.target_tpot if tpot is None else tpot for tpot in own], default=config.target_tpot)
