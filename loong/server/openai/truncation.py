"""Prompts cut to their last tokens by `truncate_prompt_tokens`."""

from collections.abc import Sequence
from dataclasses import replace

from loong.engine.client import EngineLimits
from loong.server.openai.parameters import num_asked_tokens
from loong.server.openai.prompts import Prompt
from loong.server.openai.schemas import GenerationFields
from loong.server.text.tokenizer import Tokenizer


async def truncated(
    prompts: Sequence[Prompt], fields: GenerationFields, tokenizer: Tokenizer, limits: EngineLimits
) -> Sequence[Prompt]:
    """Return the prompts with at most the requested number of tokens. Echoed text is that of these tokens."""
    if (most := fields.truncate_prompt_tokens) is None:
        return prompts
    most = max(1, _room(fields, limits) if most == -1 else most)
    return [
        prompt if len(prompt.token_ids) <= most else await _cut(prompt, most, tokenizer) for prompt in prompts
    ]


def _room(fields: GenerationFields, limits: EngineLimits) -> int:
    """Return how many prompt tokens fit together with all tokens to produce."""
    asked = num_asked_tokens(fields)
    num_output_tokens = asked if asked is not None else fields.default_max_tokens or 1
    in_model = limits.max_model_len - num_output_tokens
    return min(in_model, limits.max_request_kv - fields.n * num_output_tokens)


async def _cut(prompt: Prompt, most: int, tokenizer: Tokenizer) -> Prompt:
    token_ids = prompt.token_ids[-most:]
    return replace(prompt, token_ids=token_ids, echo=await tokenizer.text(token_ids) if prompt.echo else "")
