"""`/tokenize` and `/detokenize`, with vLLM's fields."""

import asyncio

from aiohttp import web

from loong.server.answers.status import Detokenized, Tokenized
from loong.server.api.errors import bad_request
from loong.server.api.json_bodies import json_response, read_fields
from loong.server.context import SERVER
from loong.server.openai.prompts import check_prompt_ids
from loong.server.openai.schemas import DetokenizeFields, TokenizeFields


async def tokenize(http: web.Request) -> web.Response:
    """Return the token ids of a text or of a chat."""
    server = http.app[SERVER]
    fields = await read_fields(http, TokenizeFields)
    server.check_model(fields.model)
    if (fields.prompt is None) == (fields.messages is None):
        raise bad_request("exactly one of prompt and messages must be given", "prompt")
    if fields.prompt is None:
        token_ids = await server.chat_prompts.token_ids(fields)
    else:
        token_ids = await server.tokenizer.encode(
            fields.prompt, add_special_tokens=fields.add_special_tokens is not False
        )
    pieces = None
    if fields.return_token_strs:
        pieces = await asyncio.to_thread(list, map(server.tokenizer.piece, token_ids))
    max_model_len = server.engine.limits.max_model_len
    return json_response(Tokenized(len(token_ids), max_model_len, token_ids, pieces))


async def detokenize(http: web.Request) -> web.Response:
    """Return the text of token ids, including special tokens."""
    server = http.app[SERVER]
    fields = await read_fields(http, DetokenizeFields)
    server.check_model(fields.model)
    await check_prompt_ids("tokens", fields.tokens, server.engine.limits.vocab_size)
    return json_response(Detokenized(await server.tokenizer.text(fields.tokens)))
