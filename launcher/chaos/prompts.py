"""Prompts of mixed lengths, drawn from a seed."""

from dataclasses import dataclass
from random import Random

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
    random = Random(seed)

    def length(shortest: int, longest: int) -> int:
        low = min(shortest, longest)
        return min(longest, round(low * (longest / low) ** random.random()))

    def prompt() -> Prompt:
        num_tokens, num_output_tokens = (
            length(SHORTEST_PROMPT, longest_prompt),
            length(SHORTEST_OUTPUT, longest_output),
        )
        return Prompt(tuple(random.choices(range(vocab_size), k=num_tokens)), num_output_tokens)

    return [prompt() for _ in range(num_prompts)]
