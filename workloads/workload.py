"""Named workloads: which lengths, which shared documents, which pace.

Published facts are the ranges; the shapes inside them, where no data set is read, are stated fits.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice

import numpy as np

from loong.core.errors import ConfigError
from loong.workloads import lengths
from loong.workloads.arrivals import arrival_times
from loong.workloads.request import RequestShape, TokenRun, WorkloadRequest

ShapeSource = Callable[[np.random.Generator, int], list[RequestShape]]

MAX_SHAREGPT_PROMPT = 2_300
LEVAL_QUESTIONS_PER_DOCUMENT = 4
LEVAL_QUESTION_TOKENS = 64
VICTIMS_PER_SECOND = 10.0
REQUESTS_PER_ATTACKER = 300
FIRST_ATTACKER = 5
MIXED_TOGETHER = 12  # so many requests in a row have as many of each kind
SHAPES_AT_ONCE = 300  # a multiple of all of the above, so that blocks drawn one by one join without a seam


def sharegpt(rng: np.random.Generator, num_requests: int) -> list[RequestShape]:
    """Chats: 4 to 2,300 tokens in, at most 1,000 out (LoongServe's range).

    Log-normal fits whose means are those the vLLM paper gives for ShareGPT: 161 in and 338 out.
    """
    prompts = lengths.log_normal(rng, num_requests, median=75, sigma=1.3, low=4, high=MAX_SHAREGPT_PROMPT)
    return _private_prompts(rng, prompts, _chat_outputs(rng, num_requests))


def leval(rng: np.random.Generator, num_requests: int) -> list[RequestShape]:
    """Questions on documents: 2,700 to 210,500 tokens in, tens to hundreds out (L-Eval, LoongServe's range).

    L-Eval asks some 2,000 questions on 508 documents, so four requests in a row share a document and
    differ in the question at its end. Log-normal around 12,000 tokens, our choice.
    """
    num_documents = -(-num_requests // LEVAL_QUESTIONS_PER_DOCUMENT)
    totals = lengths.log_normal(rng, num_documents, median=12_000, sigma=0.9, low=2_700, high=210_500)
    documents = [TokenRun(_seed(rng), int(total) - LEVAL_QUESTION_TOKENS) for total in totals]
    outputs = lengths.log_uniform(rng, num_requests, low=20, high=500)
    return [
        RequestShape(
            (
                documents[index // LEVAL_QUESTIONS_PER_DOCUMENT],
                TokenRun(_seed(rng), LEVAL_QUESTION_TOKENS),
            ),
            int(output),
        )
        for index, output in enumerate(outputs)
    ]


def lveval(rng: np.random.Generator, num_requests: int) -> list[RequestShape]:
    """Very long documents: 15,100 to 497,300 tokens in, tens out (LV-Eval, LoongServe's range).

    LV-Eval has five levels, each twice as long as the one before, equally many of each: log-uniform.
    """
    prompts = lengths.log_uniform(rng, num_requests, low=15_100, high=497_300)
    return _private_prompts(rng, prompts, lengths.log_uniform(rng, num_requests, low=10, high=100))


def mixed(rng: np.random.Generator, num_requests: int) -> list[RequestShape]:
    """One third each of sharegpt, leval and lveval, in random order: four of each in every twelve."""
    in_turn = np.tile(np.arange(MIXED_TOGETHER) % 3, (-(-num_requests // MIXED_TOGETHER), 1))
    kinds = rng.permuted(in_turn, axis=1).ravel()[:num_requests]
    sources = [
        iter(source(rng, int((kinds == kind).sum()))) for kind, source in enumerate((sharegpt, leval, lveval))
    ]
    return [next(sources[kind]) for kind in kinds]


def zipf(rng: np.random.Generator, num_requests: int, *, alpha: float) -> list[RequestShape]:
    """10 to 200,000 tokens in, weight 1 / x^alpha: LoongServe's static-versus-elastic ablation.

    It fills each length with the data-set request nearest to it; likewise, prompts up to ShareGPT's longest
    get a chat's output here, and longer ones a document question's.
    """
    prompts = lengths.zipf(rng, num_requests, alpha=alpha, offset=0.0, low=10, high=200_000)
    chats = _chat_outputs(rng, num_requests)
    questions = lengths.log_uniform(rng, num_requests, low=20, high=500)
    return _private_prompts(rng, prompts, np.where(prompts <= MAX_SHAREGPT_PROMPT, chats, questions))


def victim_attacker(rng: np.random.Generator, num_requests: int) -> list[RequestShape]:
    """Prompts of 512 tokens with one of 500,000 in every three hundred; 128 tokens out.

    At this workload's own pace of ten requests a second, a long prompt comes every thirty seconds, the first
    after half a second.
    """
    is_attacker = np.arange(num_requests) % REQUESTS_PER_ATTACKER == FIRST_ATTACKER
    prompts = np.where(is_attacker, 500_000, 512)
    return _private_prompts(rng, prompts, np.full(num_requests, 128))


WORKLOADS: Mapping[str, ShapeSource] = {
    "sharegpt": sharegpt,
    "leval": leval,
    "lveval": lveval,
    "mixed": mixed,
    "zipf1.0": partial(zipf, alpha=1.0),
    "zipf1.2": partial(zipf, alpha=1.2),
    "zipf1.4": partial(zipf, alpha=1.4),
    "victim-attacker": victim_attacker,
}


def make_workload(
    name: str,
    num_requests: int,
    *,
    seed: int,
    request_rate: float = float("inf"),
    burstiness: float = 1.0,
    length_scale: float = 1.0,
) -> list[WorkloadRequest]:
    """Return the same requests for the same arguments, by arrival time; of more, the first ones are the same.

    Lengths and arrivals come from separate streams: another rate leaves the prompts as they are.

    Raises:
        ConfigError: an unknown name, or a number out of range.
    """
    if num_requests < 1:
        raise ConfigError(f"--num-requests {num_requests} is not at least 1")
    requests = endless_workload(
        name, seed=seed, request_rate=request_rate, burstiness=burstiness, length_scale=length_scale
    )
    return list(islice(requests, num_requests))


def endless_workload(
    name: str,
    *,
    seed: int,
    request_rate: float = float("inf"),
    burstiness: float = 1.0,
    length_scale: float = 1.0,
) -> Iterator[WorkloadRequest]:
    """Return the requests of `make_workload`, one after the other without end.

    Raises:
        ConfigError: an unknown name, or a number out of range.
    """
    if name not in WORKLOADS:
        raise ConfigError(f"--workload {name!r} is unknown; choose from {', '.join(WORKLOADS)}")
    if not 0 < length_scale <= 1:
        raise ConfigError(f"--length-scale {length_scale:g} is not above 0 and at most 1; try 1/64")
    shape_seed, arrival_seed = np.random.SeedSequence(seed).spawn(2)
    times = arrival_times(np.random.default_rng(arrival_seed), request_rate, burstiness)
    shapes = _endless_shapes(WORKLOADS[name], shape_seed)
    return (WorkloadRequest(time, next(shapes).scaled(length_scale)) for time in times)


def _endless_shapes(source: ShapeSource, seed: np.random.SeedSequence) -> Iterator[RequestShape]:
    """Blocks of one size, each of a stream of its own: the first are the same however many are asked for."""
    while True:
        [block_seed] = seed.spawn(1)
        yield from source(np.random.default_rng(block_seed), SHAPES_AT_ONCE)


def own_pace(name: str) -> tuple[float, float]:
    """Return the (request rate, burstiness) a workload has by itself; all at once if it has none."""
    if name == "victim-attacker":
        return VICTIMS_PER_SECOND, float("inf")
    return float("inf"), 1.0


def _chat_outputs(rng: np.random.Generator, num_requests: int) -> lengths.Lengths:
    return lengths.log_normal(rng, num_requests, median=325, sigma=1.0, low=2, high=1_000)


def _private_prompts(
    rng: np.random.Generator, prompts: lengths.Lengths, outputs: lengths.Lengths
) -> list[RequestShape]:
    return [
        RequestShape((TokenRun(_seed(rng), int(prompt)),), int(output))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def _seed(rng: np.random.Generator) -> int:
    return int(rng.integers(2**63))
