"""Requests for tests, and what transformers says their tokens are."""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import count
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.generation.utils import GenerateDecoderOnlyOutput

from loong.core.events import ProducedToken
from loong.core.request import FinishReason, Request, RequestId, SamplingParams

SCHEMA = '{"type":"array","items":{"type":"integer"},"minItems":2}'  # which a tiny model can keep to

_numbers = count()


def greedy_request(prompt: tuple[int, ...], num_tokens: int, **params: object) -> Request:
    """A greedy request of exactly `num_tokens` and their log-probabilities, under a new id."""
    return sampled_request(prompt, num_tokens, **{"temperature": 0.0, "num_logprobs": 0, **params})


def sampled_request(prompt: tuple[int, ...], num_tokens: int, **params: object) -> Request:
    """A request of at most `num_tokens` with these sampling parameters, under a new id."""
    sampling = SamplingParams(max_tokens=num_tokens, **params)  # type: ignore[arg-type]
    return Request(f"request-{next(_numbers)}", prompt, sampling, arrival_time=0.0)


def random_prompt(length: int, seed: int, vocab_size: int = 97) -> tuple[int, ...]:
    """A prompt of random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, vocab_size, (length,), generator=generator, device="cpu").tolist())


@cache
def expected(folder: Path, prompt: tuple[int, ...], num_tokens: int) -> tuple[list[int], list[float]]:
    """The greedy tokens of transformers' `generate`, and the log-probability of each."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    output = model.generate(  # type: ignore[misc]  # transformers' own
        torch.tensor([prompt]),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    assert isinstance(output, GenerateDecoderOnlyOutput)
    assert output.logits is not None
    tokens = output.sequences[0, len(prompt) :].tolist()
    logprobs = [
        float(logits[0].float().log_softmax(-1)[token])
        for logits, token in zip(output.logits, tokens, strict=True)
    ]
    return tokens, logprobs


def assert_exact(
    folder: Path, requests: Sequence[Request], outputs: Mapping[RequestId, Sequence[ProducedToken]]
) -> None:
    """Greedy requests got the tokens of transformers, all of them, and their log-probabilities to 1e-4."""
    for request in requests:
        num_tokens = request.sampling_params.max_tokens
        tokens, logprobs = expected(folder, request.prompt_token_ids, num_tokens)
        produced = outputs[request.request_id]
        assert [token.token_id for token in produced] == tokens, request.request_id
        assert [t.logprobs.chosen for t in produced if t.logprobs] == pytest.approx(logprobs, abs=1e-4, rel=0)
        assert [t.finish_reason for t in produced] == [None] * (num_tokens - 1) + [FinishReason.LENGTH]
