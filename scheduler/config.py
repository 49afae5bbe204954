"""The planning options of an operator."""

from dataclasses import dataclass, fields
from enum import Enum

from loong.core.errors import ConfigError


class Fairness(Enum):
    """The parties that get equal shares of the cluster when not all can be served in time."""

    NONE = "none"
    USER = "user"


class AdmissionRule(Enum):
    """The length of an output for which a request must find room before it begins."""

    STRICT = "strict"  # its declared maximum: no request is ever preempted for room
    EXPECTED = "expected"  # most outputs of such requests: KV is over-committed


# Devices count exchanges and sums over all steps of a lease with its extensions: up to 2^24 a batch.
MOST_LEASE_STEPS = 1024
USUAL_STEP_TIME = 0.1  # seconds


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Limits and targets, the same for every policy.

    `target_ttft` and `target_tpot` (seconds) are for requests without an SLO of their own; longer prompts
    have `ttft_factor` times their fastest prefill. `max_num_batched_tokens` bounds the tokens of a prefill
    step on each instance, and `max_step_time` (seconds) is its target time (None: by the policy; most take
    `step_time`). A decode batch takes up to
    `lease_steps` steps by itself. `deferred_share` of the time is for the oldest deferred prompt. `fairness`
    says who is served first when not all can be in time. `chunk_tokens` is the number of tokens in a step of
    the chunked baselines, decodes and prompts together. `admission` is the length of outputs that plans count
    with. A lease that others serve is cut into up to `max_micro_batches` (None: 2 on processors, 1 on GPUs,
    which take a captured lease whole). Below `router_token_ratio` of its pool, `lightllm` expects outputs to
    be shorter than declared. A request may need `max_loan` tokens of KV more than its engine has room for
    (None: no engine lends any).
    """

    target_ttft: float = 1.0
    target_tpot: float = 0.05
    ttft_factor: float = 5.0
    max_num_batched_tokens: int = 8192
    max_step_time: float | None = None
    lease_steps: int = 16
    deferred_share: float = 0.05
    fairness: Fairness = Fairness.NONE
    chunk_tokens: int = 2048
    admission: AdmissionRule = AdmissionRule.EXPECTED
    router_token_ratio: float = 0.0
    max_micro_batches: int | None = None
    max_loan: int | None = None

    @property
    def step_time(self) -> float:
        """Return the target time of a step of prompts, or the usual one."""
        return USUAL_STEP_TIME if self.max_step_time is None else self.max_step_time

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("deferred_share", "router_token_ratio"):
                is_allowed, limits = 0 <= value <= 1, "from 0 to 1"
            elif value is None and field.default is None:
                continue
            elif field.type in (int, int | None):
                is_allowed, limits = isinstance(value, int) and value > 0, "a whole number above 0"
            else:
                is_allowed, limits = isinstance(value, Enum) or value > 0, "above 0"
            if not is_allowed:
                flag = field.name.replace("_", "-")
                raise ConfigError(f"{field.name} (--{flag}) must be {limits}, but is {value}")
        if self.lease_steps > MOST_LEASE_STEPS:
            raise ConfigError(
                f"lease_steps (--lease-steps) must be at most {MOST_LEASE_STEPS}, but is {self.lease_steps}"
            )
