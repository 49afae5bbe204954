"""Requests of many users, each with a system prompt that the user's requests share."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from loong.core.errors import ConfigError
from loong.workloads.distributions import lengths
from loong.workloads.request import RequestShape, TokenRun
from loong.workloads.source import in_blocks, new_seed

SYSTEM_PROMPTS = tuple(64 * 2**doublings for doublings in range(10))  # 64 to 32,768 tokens
PRIVATE = (128, 1_024)  # tokens, both included
OUTPUTS = (128, 512)


@dataclass(frozen=True)
class SharedPrefix:
    """A system prompt of 64 to 32,768 tokens, 128 to 1,024 private tokens, and 128 to 512 tokens out.

    The ranges are those of RelayAttention's measurements (ACL 2024). There are ten users, one for each of 64,
    128 ... 32,768 tokens; with `prefix` all ten have system prompts of this many tokens. Requests come from
    the users at random.
    """

    name: ClassVar[str] = "shared-prefix"

    prefix: int | None = None

    def __post_init__(self) -> None:
        if self.prefix is not None and not 1 <= self.prefix <= SYSTEM_PROMPTS[-1]:
            raise ConfigError(f"PREFIX {self.prefix} is not from 1 to {SYSTEM_PROMPTS[-1]} tokens")

    def __str__(self) -> str:
        return self.name if self.prefix is None else f"{self.name}({self.prefix})"

    def shapes(self, seed: np.random.SeedSequence) -> Iterator[RequestShape]:
        """Return shapes without end."""
        [prompt_seed] = seed.spawn(1)
        rng = np.random.default_rng(prompt_seed)
        sizes = SYSTEM_PROMPTS if self.prefix is None else (self.prefix,) * len(SYSTEM_PROMPTS)
        system_prompts = [TokenRun(new_seed(rng), num_tokens) for num_tokens in sizes]
        return in_blocks(lambda rng, size: _draw(rng, size, system_prompts), seed)


def _draw(rng: np.random.Generator, num_requests: int, system_prompts: list[TokenRun]) -> list[RequestShape]:
    users = rng.integers(len(system_prompts), size=num_requests)
    private = lengths.uniform(rng, num_requests, low=PRIVATE[0], high=PRIVATE[1])
    outputs = lengths.uniform(rng, num_requests, low=OUTPUTS[0], high=OUTPUTS[1])
    return [
        RequestShape(
            (system_prompts[user], TokenRun(new_seed(rng), int(num_private))), int(output), f"user-{user}"
        )
        for user, num_private, output in zip(users, private, outputs, strict=True)
    ]
