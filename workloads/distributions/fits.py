"""Built-in stand-ins for data sets, and a workload of short requests that wait for long ones.

Published facts are the ranges; the shapes inside them are stated fits.
"""

import numpy as np

from loong.workloads.distributions import lengths
from loong.workloads.request import RequestShape, TokenRun
from loong.workloads.source import new_seed, private_prompts

MAX_SHAREGPT_PROMPT = 2_300
CHAT_MEDIAN, CHAT_SIGMA = 75, 1.3  # of the log-normal of its prompts
LEVAL_QUESTIONS_PER_DOCUMENT = 4
LEVAL_QUESTION_TOKENS = 64
VICTIMS_PER_SECOND = 10.0
REQUESTS_PER_ATTACKER = 300
FIRST_ATTACKER = 5
MIXED_TOGETHER = 12  # this many requests in a row have equal numbers of each kind


def sharegpt(rng: np.random.Generator, num_requests: int) -> list[RequestShape]:
    """Return chats: 4 to 2,300 tokens in, at most 1,000 out (LoongServe's range).

    Log-normal fits whose means are those the vLLM paper gives for ShareGPT: 161 in and 338 out.
    """
    prompts = chat_prompts(rng, num_requests)
    return private_prompts(rng, prompts, chat_outputs(rng, num_requests))


def leval(
    rng: np.random.Generator, num_requests: int, num_questions: int = LEVAL_QUESTIONS_PER_DOCUMENT
) -> list[RequestShape]:
    """Return questions on documents: 2,700 to 210,500 tokens in, tens to hundreds out.

    The ranges are LoongServe's for L-Eval.

    L-Eval asks some 2,000 questions on 508 documents, so four requests in a row share a document and differ
    in the question at its end. `num_questions` is another number of them. Log-normal around 12,000 tokens,
    our choice.
    """
    num_documents = -(-num_requests // num_questions)
    totals = lengths.log_normal(rng, num_documents, median=12_000, sigma=0.9, low=2_700, high=210_500)
    documents = [TokenRun(new_seed(rng), int(total) - LEVAL_QUESTION_TOKENS) for total in totals]
    outputs = _question_outputs(rng, num_requests)
    return [
        RequestShape(
            (
                documents[index // num_questions],
                TokenRun(new_seed(rng), LEVAL_QUESTION_TOKENS),
            ),
            int(output),
        )
        for index, output in enumerate(outputs)
    ]


def lveval(rng: np.random.Generator, num_requests: int) -> list[RequestShape]:
    """Return very long documents: 15,100 to 497,300 tokens in, tens out.

    The ranges are LoongServe's for LV-Eval.

    LV-Eval has five levels, each twice as long as the one before, equally many of each: log-uniform.
    """
    prompts = lengths.log_uniform(rng, num_requests, low=15_100, high=497_300)
    return private_prompts(rng, prompts, lengths.log_uniform(rng, num_requests, low=10, high=100))


def mixed(rng: np.random.Generator, num_requests: int) -> list[RequestShape]:
    """Return one third each of sharegpt, leval and lveval, in random order: four of each in every twelve."""
    in_turn = np.tile(np.arange(MIXED_TOGETHER) % 3, (-(-num_requests // MIXED_TOGETHER), 1))
    kinds = rng.permuted(in_turn, axis=1).ravel()[:num_requests]
    sources = [
        iter(source(rng, int((kinds == kind).sum()))) for kind, source in enumerate((sharegpt, leval, lveval))
    ]
    return [next(sources[kind]) for kind in kinds]


def victim_attacker(rng: np.random.Generator, num_requests: int) -> list[RequestShape]:
    """Return prompts of 512 tokens with one of 500,000 in every three hundred; 128 tokens out.

    At this workload's own pace of ten requests a second, a long prompt comes every thirty seconds, the first
    after half a second.
    """
    is_attacker = np.arange(num_requests) % REQUESTS_PER_ATTACKER == FIRST_ATTACKER
    prompts = np.where(is_attacker, 500_000, 512)
    return private_prompts(rng, prompts, np.full(num_requests, 128))


def answers(rng: np.random.Generator, prompts: lengths.Lengths) -> lengths.Lengths:
    """Draw output lengths for prompts whose lengths alone are known.

    LoongServe's ablation on Zipf lengths replaces each by the nearest request of a data set. Here prompts up
    to ShareGPT's longest get a chat's answer, and longer ones a document question's.
    """
    chats = chat_outputs(rng, len(prompts))
    return np.where(prompts <= MAX_SHAREGPT_PROMPT, chats, _question_outputs(rng, len(prompts)))


def chat_prompts(rng: np.random.Generator, num_requests: int) -> lengths.Lengths:
    """Draw the lengths of messages to a chat."""
    return lengths.log_normal(
        rng, num_requests, median=CHAT_MEDIAN, sigma=CHAT_SIGMA, low=4, high=MAX_SHAREGPT_PROMPT
    )


def chat_outputs(rng: np.random.Generator, num_requests: int) -> lengths.Lengths:
    """Draw the lengths of answers in a chat."""
    return lengths.log_normal(rng, num_requests, median=325, sigma=1.0, low=2, high=1_000)


def _question_outputs(rng: np.random.Generator, num_requests: int) -> lengths.Lengths:
    return lengths.log_uniform(rng, num_requests, low=20, high=500)
