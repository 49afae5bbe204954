"""Prompts in every form the API takes, as token ids."""

import asyncio
from collections.abc import Sequence

from loong.core.request import TokenId
from loong.server.errors import bad_request
from loong.server.schemas import ChatFields, CompletionFields, Message, TokenizeFields
from loong.server.tokenizer import Tokenizer


async def completion_prompt(fields: CompletionFields, tokenizer: Tokenizer) -> list[TokenId]:
    """Token ids of a completion's prompt: a text, token ids, or a list that holds exactly one of them."""
    prompt = fields.prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            message = f"prompt must hold one prompt, but holds {len(prompt)}: send one request for each"
            raise bad_request(message, "prompt", "unsupported_parameter")
        prompt = prompt[0]
    if isinstance(prompt, str):
        return await tokenizer.encode(prompt, add_special_tokens=fields.add_special_tokens)
    if isinstance(prompt, list) and set(map(type, prompt)) <= {int}:  # a bool is no token id
        return prompt
    raise bad_request("prompt must be a string, a list of token ids, or a list of one of these", "prompt")


async def chat_prompt(fields: ChatFields | TokenizeFields, tokenizer: Tokenizer) -> list[TokenId]:
    """Token ids of a conversation, by the model's chat template, which writes its special tokens itself."""
    messages: Sequence[Message] = fields.messages or []
    template = tokenizer.chat_template
    if template is None:
        message = "this model has no chat template; send its prompt to /v1/completions"
        raise bad_request(message, "messages", "no_chat_template")
    text = await asyncio.to_thread(
        template.render,
        [message.for_template() for message in messages],
        add_generation_prompt=fields.add_generation_prompt,
        variables=fields.chat_template_kwargs,
    )
    return await tokenizer.encode(text, add_special_tokens=bool(fields.add_special_tokens))


def check_token_ids(name: str, token_ids: Sequence[TokenId], vocab_size: int) -> None:
    """Raise a 400 that names the field and the id if the model has no such token."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        unknown = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise bad_request(f"{name} holds token id {unknown}, but ids go from 0 to {vocab_size - 1}", name)
