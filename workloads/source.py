"""What most sources of shapes of requests are made of."""

from collections.abc import Callable, Iterator

import numpy as np

from loong.workloads.distributions.lengths import Lengths
from loong.workloads.request import RequestShape, TokenRun

Draw = Callable[[np.random.Generator, int], list[RequestShape]]

SHAPES_AT_ONCE = (
    300  # a multiple of every pattern's length, so that blocks drawn one by one join without a seam
)


def in_blocks(draw: Draw, seed: np.random.SeedSequence) -> Iterator[RequestShape]:
    """Blocks of one size, each of a stream of its own: the first are the same however many are asked for."""
    while True:
        [block_seed] = seed.spawn(1)
        yield from draw(np.random.default_rng(block_seed), SHAPES_AT_ONCE)


def private_prompts(rng: np.random.Generator, prompts: Lengths, outputs: Lengths) -> list[RequestShape]:
    """Return a shape for each pair of lengths; none shares a prefix."""
    return [
        RequestShape((TokenRun(new_seed(rng), int(prompt)),), int(output))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def new_seed(rng: np.random.Generator) -> int:
    """Draw the seed of a run of tokens."""
    return int(rng.integers(2**63))
