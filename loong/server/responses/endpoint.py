"""`/v1/responses`."""

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from aiohttp import web

from loong.core.errors import InvalidRequestError
from loong.server.api.errors import ApiError, as_api_error
from loong.server.api.json_bodies import read_fields
from loong.server.context import SERVER
from loong.server.openai.chat import prompt_of_chat
from loong.server.openai.completions import complete
from loong.server.responses.fields import ResponseFields
from loong.server.responses.shape import ResponseShapes

_NAMES: Mapping[str, str] = {  # field names of chats, and of responses
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "the prompt": "the input",
}
_NAME = re.compile(rf"\b(?:{'|'.join(_NAMES)})\b")
_TURN = re.compile(r"^messages\.([0-9]+)")
_OF_A_FUNCTION = ".function."  # a level that tools of responses do not have


async def responses(http: web.Request) -> web.StreamResponse:
    """Answer a conversation. Nothing is stored."""
    arrived_at, server = time.monotonic(), http.app[SERVER]
    given = await read_fields(http, ResponseFields)
    with _names_of_responses(given):
        server.check_model(given.model)
        fields = given.as_chat()
        prompt = await prompt_of_chat(fields, server)
        return await complete(http, fields, [prompt], ResponseShapes(given), arrived_at)


@contextmanager
def _names_of_responses(given: ResponseFields) -> Iterator[None]:
    """Rename the fields in errors raised inside the context to those of responses."""
    try:
        yield
    except (ApiError, InvalidRequestError) as error:
        reported = as_api_error(error)
        message = _TURN.sub(lambda found: given.field_of_turn(int(found[1])), reported.message)
        message = _NAME.sub(lambda found: _NAMES[found[0]], message).replace(_OF_A_FUNCTION, ".")
        param = reported.param and _NAMES.get(reported.param, reported.param)
        raise ApiError(reported.status, message, reported.code, param, reported.headers) from error
