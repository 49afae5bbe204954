"""Prompts in all forms of the API, as token ids."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from loong.core.request import TokenId
from loong.server.api.errors import bad_request
from loong.server.api.schema_base import as_integers
from loong.server.openai.schemas import MAX_PROMPTS, CompletionFields
from loong.server.text.tokenizer import Tokenizer
from loong.server.tools.use import ToolUse

T = TypeVar("T")

_PIECE = 2**16  # items, which take a millisecond or two


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt. `name` is its name in errors, `echo` the text that the answer begins with.

    `tools` are the tools that the answer may call.
    """

    name: str
    token_ids: Sequence[TokenId]
    echo: str = ""
    tools: ToolUse | None = None


async def completion_prompts(fields: CompletionFields, tokenizer: Tokenizer, vocab_size: int) -> list[Prompt]:
    """Return a completion's prompts, given as a text, token ids, or a list of texts or of lists of ids.

    Raises a 400 for anything else, and for ids that the model does not have.
    """
    given = fields.prompt
    is_several = isinstance(given, list) and bool(given) and isinstance(given[0], str | list)
    prompts = given if is_several else [given]
    if len(prompts) > MAX_PROMPTS:
        raise bad_request(f"prompt may hold {MAX_PROMPTS} prompts, but holds {len(prompts)}", "prompt")
    names = [f"prompt[{i}]" for i in range(len(prompts))] if len(prompts) > 1 else ["the prompt"]
    for name, prompt in zip(names, prompts, strict=True):
        if prompt in ("", []):
            raise bad_request(f"{name} is empty; it needs at least one character or token id", "prompt")
    all_token_ids = await _token_ids(prompts, tokenizer, add_special_tokens=fields.add_special_tokens)
    for name, token_ids in zip(names, all_token_ids, strict=True):
        await check_prompt_ids(name, token_ids, vocab_size, "prompt")
    if not fields.echo:
        return [Prompt(*pair) for pair in zip(names, all_token_ids, strict=True)]
    return [
        Prompt(name, ids, prompt if isinstance(prompt, str) else await tokenizer.text(ids))
        for name, prompt, ids in zip(names, prompts, all_token_ids, strict=True)
    ]


async def _token_ids(
    prompts: Sequence[object], tokenizer: Tokenizer, *, add_special_tokens: bool
) -> Sequence[Sequence[TokenId]]:
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    lists = [
        token_ids
        for prompt in prompts
        if isinstance(prompt, list) and (token_ids := await _integers(prompt)) is not None
    ]
    if len(texts) == len(prompts):
        return await tokenizer.encode_all(texts, add_special_tokens=add_special_tokens)
    if len(lists) == len(prompts):  # bools are ints, but not token ids
        return lists
    what = "a string, a list of token ids, or a list of strings or of lists of token ids"
    raise bad_request(f"prompt must be {what}", "prompt")


async def _integers(items: Sequence[object]) -> Sequence[TokenId] | None:
    """Return a list of whole numbers as integers, or None for others."""
    if await _are_integers(items):
        return cast("Sequence[TokenId]", items)
    whole: list[object] = []
    async for piece in _pieces(items):
        whole += as_integers(piece)
    return cast("Sequence[TokenId]", whole) if await _are_integers(whole) else None


async def _are_integers(items: Sequence[object]) -> bool:
    """Return whether all items are integers, not booleans."""
    async for piece in _pieces(items):
        if not set(map(type, piece)) <= {int}:
            return False
    return True


async def _pieces(items: Sequence[T]) -> AsyncIterator[Sequence[T]]:
    """Yield all items in pieces. Other tasks run after each piece."""
    for begin in range(0, len(items), _PIECE):
        yield items[begin : begin + _PIECE]
        if begin + _PIECE < len(items):
            await asyncio.sleep(0)


async def check_prompt_ids(
    name: str, token_ids: Sequence[TokenId], vocab_size: int, field: str | None = None
) -> None:
    """Check any number of token ids as `check_token_ids` does."""
    async for piece in _pieces(token_ids):
        check_token_ids(name, piece, vocab_size, field)


def check_token_ids(
    name: str, token_ids: Sequence[TokenId], vocab_size: int, field: str | None = None
) -> None:
    """Raise a 400 that names the field and the id if the model has no such token."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        unknown = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise bad_request(
            f"{name} holds token id {unknown}, but ids go from 0 to {vocab_size - 1}", field or name
        )
