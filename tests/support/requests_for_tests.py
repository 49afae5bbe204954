"""Requests for tests, and what transformers says their tokens are."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache, lru_cache
from itertools import count
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput

from loong.core.events import ProducedToken
from loong.core.grammar import Grammar, GrammarKind
from loong.core.prompt_logprobs import PromptLogprobs
from loong.core.request import FinishReason, Request, RequestId, SamplingParams

SCHEMA = Grammar(  # which a tiny model can keep to
    GrammarKind.JSON_SCHEMA, '{"type":"array","items":{"type":"integer"},"minItems":2}'
)

_numbers = count()


def greedy_request(prompt: tuple[int, ...], num_tokens: int, **params: object) -> Request:
    """Return a greedy request of exactly `num_tokens` and their log-probabilities, under a new id."""
    return sampled_request(prompt, num_tokens, **{"temperature": 0.0, "num_logprobs": 0, **params})


def scored_request(length: int, num_top: int, num_tokens: int = 4) -> Request:
    """A greedy request that asks for log-probabilities of its random prompt too, `num_top` at a position."""
    request = greedy_request(random_prompt(length, seed=length), num_tokens)
    return replace(request, num_prompt_logprobs=num_top)


def sampled_request(prompt: tuple[int, ...], num_tokens: int, **params: object) -> Request:
    """Return a request of at most `num_tokens` with these sampling parameters, under a new id."""
    sampling = SamplingParams(max_tokens=num_tokens, **params)  # type: ignore[arg-type]
    return Request(f"request-{next(_numbers)}", prompt, sampling, arrival_time=0.0)


def random_prompt(length: int, seed: int, vocab_size: int = 97) -> tuple[int, ...]:
    """Return a prompt of random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, vocab_size, (length,), generator=generator, device="cpu").tolist())


@cache
def expected(folder: Path, prompt: tuple[int, ...], num_tokens: int) -> tuple[list[int], list[float]]:
    """Return the greedy tokens of transformers' `generate`, and the log-probability of each."""
    output = deepcopy(_model(folder)).generate(  # a rope may remember the longest sequence
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),  # it would leave out padding tokens
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


@lru_cache(maxsize=4)
def _model(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model


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


@cache
def expected_prompt(folder: Path, prompt: tuple[int, ...]) -> torch.Tensor:
    """The log-probabilities [T - 1, V] that transformers' model gives the tokens after each of a prompt."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([prompt])).logits
    return logits[0, :-1].double().log_softmax(-1)


def assert_prompt_exact(folder: Path, request: Request, found: PromptLogprobs | None) -> None:
    """A prompt's log-probabilities are those of transformers to 1e-4, for each token but the first."""
    prompt, count = tuple(request.prompt_token_ids), request.num_prompt_logprobs
    if count is None or len(prompt) == 1:
        assert found is None
        return
    assert found is not None
    assert found.positions == range(1, len(prompt))
    logprobs = expected_prompt(folder, prompt)
    chosen = logprobs.gather(1, torch.tensor(prompt[1:]).unsqueeze(1))
    assert found.chosen == pytest.approx(chosen.flatten().tolist(), abs=1e-4, rel=0)
    best, worst = ((logprobs > chosen + 1e-4).sum(1) + 1, (logprobs >= chosen - 1e-4).sum(1))
    assert all(a <= rank <= b for a, rank, b in zip(best.tolist(), found.ranks, worst.tolist(), strict=True))
    assert (len(found.top), len(found.top_ids)) == (count, count)
    if count:
        top, top_ids = torch.tensor(found.top).T, torch.tensor(found.top_ids).T
        for same in (logprobs.topk(count).values, logprobs.gather(1, top_ids)):
            torch.testing.assert_close(top.double(), same, atol=1e-4, rtol=0)
