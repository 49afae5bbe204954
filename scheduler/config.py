"""What an operator may choose about planning."""

from dataclasses import dataclass

from loong.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Limits and targets, the same for every policy.

    `target_ttft` (seconds) is for requests without an SLO of their own. `max_num_batched_tokens` bounds
    what a prefill step computes, an instance. A decode batch takes up to `lease_steps` steps by itself.
    """

    target_ttft: float = 0.1
    max_num_batched_tokens: int = 512
    lease_steps: int = 16

    def __post_init__(self) -> None:
        for name in ("target_ttft", "max_num_batched_tokens", "lease_steps"):
            value = getattr(self, name)
            if not value > 0:
                flag = name.replace("_", "-")
                raise ConfigError(f"{name} (--{flag}) must be above 0, but is {value}")
