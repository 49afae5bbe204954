"""Requests for tests, and what transformers says their tokens are."""

from functools import cache
from itertools import count
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from loong.core.request import Request, SamplingParams

_numbers = count()


def greedy_request(prompt: tuple[int, ...], num_tokens: int, **params: object) -> Request:
    """A greedy request of exactly `num_tokens`, under a new id."""
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, **params)  # type: ignore[arg-type]
    return Request(f"request-{next(_numbers)}", prompt, sampling, arrival_time=0.0)


def random_prompt(length: int, seed: int, vocab_size: int = 97) -> tuple[int, ...]:
    """A prompt of random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, vocab_size, (length,), generator=generator).tolist())


@cache
def expected(folder: Path, prompt: tuple[int, ...], num_tokens: int) -> tuple[list[int], list[float]]:
    """The greedy tokens of transformers' `generate`, and the log-probability of each."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    output = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = output.sequences[0, len(prompt) :].tolist()
    logprobs = [
        float(logits[0].float().log_softmax(-1)[token])
        for logits, token in zip(output.logits, tokens, strict=True)
    ]
    return tokens, logprobs
