"""Prompts of mixed lengths, drawn from a seed."""

from dataclasses import dataclass

import numpy as np

from loong.core.request import TokenId

SHORTEST_PROMPT, SHORTEST_OUTPUT = 4, 16  # tokens


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and the length of its output, in tokens."""

    token_ids: tuple[TokenId, ...]
    num_output_tokens: int


def drawn_prompts(
    num_prompts: int, longest_prompt: int, longest_output: int, vocab_size: int, seed: int
) -> list[Prompt]:
    """Return prompts whose logarithms of lengths are uniform; the same seed gives the same prompts."""
    generator = np.random.default_rng(seed)

    def length(shortest: int, longest: int) -> int:
        low = min(shortest, longest)
        drawn: float = low * (longest / low) ** float(generator.random())
        return min(longest, round(drawn))

    def prompt() -> Prompt:
        token_ids = generator.integers(vocab_size, size=length(SHORTEST_PROMPT, longest_prompt))
        return Prompt(tuple(token_ids.tolist()), length(SHORTEST_OUTPUT, longest_output))

    return [prompt() for _ in range(num_prompts)]
