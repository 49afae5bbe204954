"""Parameters of requests to the engine, checked against the limits of model and cluster."""

import secrets
from collections.abc import Sequence

from loong.core.grammar import Grammar
from loong.core.limits import NUM_SEEDS
from loong.core.request import SamplingParams, TokenId
from loong.engine.client import EngineLimits
from loong.server.api.errors import ApiError, bad_request
from loong.server.api.parsing import short
from loong.server.openai.prompts import Prompt, check_token_ids
from loong.server.openai.schemas import GenerationFields

MAX_PROMPT_LOGPROBS = 2**19  # of all prompts and choices of a request; some 40 MB of JSON
_MAX_SHOWN = 8  # wrong names


def sampling_params(
    fields: GenerationFields,
    *,
    max_tokens: int,
    eos_token_ids: tuple[TokenId, ...],
    vocab_size: int,
    grammar: Grammar | None,
    bad_words: tuple[tuple[TokenId, ...], ...],
) -> SamplingParams:
    """Return the engine's parameters. Without a seed a random one is used; end-of-sequence tokens stop it.

    The engine samples at least one token, and an answer without tokens leaves it out. Raises
    `InvalidRequestError` for a value out of range.
    """
    check_token_ids("stop_token_ids", fields.stop_token_ids, vocab_size)
    check_token_ids("allowed_token_ids", fields.allowed_token_ids or (), vocab_size)
    if max_tokens == 0 and fields.min_tokens:
        message = f"min_tokens must be 0 where no token is asked for, but is {fields.min_tokens}"
        raise bad_request(message, "min_tokens")
    eos = () if fields.ignore_eos else (token_id for token_id in eos_token_ids if token_id < vocab_size)
    return SamplingParams(
        max_tokens=max(1, max_tokens),
        min_tokens=fields.min_tokens,
        temperature=fields.temperature if fields.top_p else 0.0,
        top_p=fields.top_p or 1.0,
        top_k=fields.top_k if fields.top_k > 0 else None,
        min_p=fields.min_p,
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        repetition_penalty=fields.repetition_penalty,
        seed=secrets.randbelow(NUM_SEEDS) if fields.seed is None else fields.seed % NUM_SEEDS,
        stop_token_ids=tuple(dict.fromkeys((*fields.stop_token_ids, *eos))),
        num_logprobs=fields.num_logprobs,
        logit_bias=_logit_bias(fields, vocab_size),
        grammar=grammar,
        allowed_token_ids=None if fields.allowed_token_ids is None else tuple(fields.allowed_token_ids),
        bad_words=bad_words,
    )


def _logit_bias(fields: GenerationFields, vocab_size: int) -> tuple[tuple[TokenId, float], ...]:
    wrong = [name for name in fields.logit_bias if not _is_token_id(name, vocab_size)]
    if wrong:
        shown = ", ".join(repr(short(name)) for name in wrong[:_MAX_SHOWN])
        more = f" and {len(wrong) - _MAX_SHOWN} more" if len(wrong) > _MAX_SHOWN else ""
        message = f"logit_bias must be by token ids from 0 to {vocab_size - 1}, but has {shown}{more}"
        raise bad_request(message, "logit_bias")
    return tuple((int(token), bias) for token, bias in fields.logit_bias.items())


def _is_token_id(name: str, vocab_size: int) -> bool:
    """Return whether a key is a token id in its shortest form, so that no token has two biases."""
    return (
        name.isascii()
        and name.isdigit()
        and len(name) < 10
        and int(name) < vocab_size
        and name == str(int(name))
    )


def num_asked_tokens(fields: GenerationFields) -> int | None:
    """Return the most tokens that the request allows, or None if it does not say."""
    return fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens


def max_output_tokens(fields: GenerationFields, prompt: Prompt, limits: EngineLimits) -> int:
    """Return the most tokens to produce: the request's bound, else the endpoint's default, as far as they
    fit.

    Raises a 400 that names the number and each limit that it exceeds, or if no token fits after the prompt.
    """
    name = "max_tokens" if fields.max_completion_tokens is None else "max_completion_tokens"
    asked, num_prompt_tokens, n = num_asked_tokens(fields), len(prompt.token_ids), fields.n
    room = min(limits.max_model_len - num_prompt_tokens, (limits.max_request_kv - num_prompt_tokens) // n)
    what = f"{prompt.name} has {num_prompt_tokens} tokens"
    of_each = f" for each of {n} choices" if n > 1 else ""
    if asked == 0 and not fields.is_about_prompt:
        message = f"{name} must be 1 or more, or 0 with echo or prompt_logprobs, but is 0"
        raise bad_request(message, name)
    if room < 1 and not (room == 0 == asked):
        what = f"{what} and needs room for one more{of_each}"
        raise _too_long(what, fields.prompt_field, num_prompt_tokens + 1, num_prompt_tokens + n, limits)
    if asked is None:
        return min(fields.default_max_tokens or room, room)
    if asked > room:
        total = num_prompt_tokens + n * asked
        what = f"{what} and {name} is {asked}{of_each}, together {total}"
        raise _too_long(what, name, num_prompt_tokens + asked, total, limits)
    return asked


def num_prompt_logprobs(fields: GenerationFields, prompts: Sequence[Prompt]) -> int | None:
    """Return how many of the likeliest tokens the engine reports at each position of a prompt.

    Returns None if it reports nothing about prompts. Raises a 400 if the answer would be too large.
    """
    asked = {"prompt_logprobs": fields.prompt_logprobs, "logprobs": fields.num_echoed_logprobs}
    counts = {name: count for name, count in asked.items() if count is not None}
    if not counts:
        return None
    num_tokens = fields.n * sum(len(prompt.token_ids) for prompt in prompts)
    for name, count in counts.items():
        if num_tokens * (1 + count) > MAX_PROMPT_LOGPROBS:
            raise bad_request(
                f"{name} asks for {1 + count} log probabilities of each of {num_tokens} prompt tokens, "
                f"together {num_tokens * (1 + count)}, but at most {MAX_PROMPT_LOGPROBS} are allowed",
                name,
            )
    return max(counts.values())


def _too_long(what: str, param: str, num_tokens: int, num_all: int, limits: EngineLimits) -> ApiError:
    """Return the error for `num_tokens` tokens in one choice and `num_all` in all choices of a request."""
    bounds = (
        (num_tokens, limits.max_model_len, "the model's length is {} tokens"),
        (num_all, limits.max_request_kv, "the cluster has KV room for {} tokens of one request"),
    )
    passed = " and ".join(text.format(bound) for needed, bound, text in bounds if needed > bound)
    return bad_request(f"{what}, but {passed}", param, "context_length_exceeded")
