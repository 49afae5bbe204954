"""Building blocks of most sources of request shapes."""

from collections.abc import Callable, Iterator

import numpy as np

from loong.workloads.distributions.lengths import Lengths
from loong.workloads.request import NUM_SEEDS, RequestShape, TokenRun

Draw = Callable[[np.random.Generator, int], list[RequestShape]]

SHAPES_AT_ONCE = (
    300  # a multiple of every pattern's length, so that blocks drawn one by one join without a seam
)


def in_blocks(draw: Draw, seed: np.random.SeedSequence, size: int = SHAPES_AT_ONCE) -> Iterator[RequestShape]:
    """Yield shapes in blocks of one size, each from its own random stream.

    So the first shapes are the same for any number that is drawn.
    """
    while True:
        [block_seed] = seed.spawn(1)
        yield from draw(np.random.default_rng(block_seed), size)


def private_prompts(rng: np.random.Generator, prompts: Lengths, outputs: Lengths) -> list[RequestShape]:
    """Return a shape for each pair of lengths; none shares a prefix."""
    return [
        RequestShape((TokenRun(new_seed(rng), int(prompt)),), int(output))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def new_seed(rng: np.random.Generator) -> int:
    """Draw the seed of a run of tokens."""
    return int(rng.integers(NUM_SEEDS))
