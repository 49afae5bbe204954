"""Prompts of conversations, as token ids."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from loong.core.request import TokenId
from loong.server.api.errors import bad_request
from loong.server.api.ignored_keys import IgnoredKeys
from loong.server.openai.arrangements import Arrangements
from loong.server.openai.conversation import Conversation
from loong.server.openai.messages import KNOWN_ROLES, Message
from loong.server.openai.probe import Probe
from loong.server.openai.schemas import ChatFields, TokenizeFields
from loong.server.text.chat_renderer import ChatRenderer
from loong.server.text.chat_template import ChatTemplate
from loong.server.text.special_tokens import Literals
from loong.server.text.tokenizer import Tokenizer
from loong.server.tools.plain_turns import Turn, with_offer

T = TypeVar("T")

_MANY_MESSAGES = 64
_LONG_TEXT = 2**14  # characters


class ChatPrompts:
    """Writes prompts by the chat templates of a model. Its processes start at the first use."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._renderer = ChatRenderer()
        self._arrangements = Arrangements(self._renderer)
        self._ignored_keys = IgnoredKeys()

    async def token_ids(self, fields: ChatFields | TokenizeFields, ending: str = "") -> list[TokenId]:
        """Return the token ids of a conversation by the model's chat template, which writes special tokens
        itself.

        They end with `ending`, the beginning of the answer.
        """
        has_tools = fields.tools_for_template() is not None
        template = self._tokenizer.tool_template if has_tools else self._tokenizer.chat_template
        if template is None:
            message = "this model has no chat template; send its prompt to /v1/completions"
            raise bad_request(message, "messages", "no_chat_template")
        literals = self._tokenizer.literals()
        is_large = _is_large(fields)
        conversation = await _done(is_large, lambda: self._conversation(fields, template, literals))
        probe = await _done(is_large, lambda: Probe(conversation))
        arrangement = await self._arrangements.of(probe)
        rendered = await self._renderer.render(
            await _done(is_large, lambda: conversation.request(arrangement))
        )
        pieces = await _done(
            len(rendered) > _LONG_TEXT, lambda: list(literals.pieces(conversation.prompt(rendered)))
        )
        if ending:
            pieces.append((ending, False))
        return await self._tokenizer.encode_pieces(pieces, add_special_tokens=bool(fields.add_special_tokens))

    async def close(self) -> None:
        """End all processes."""
        await self._renderer.close()

    def _conversation(
        self, fields: ChatFields | TokenizeFields, template: ChatTemplate, literals: Literals
    ) -> Conversation:
        """Return a conversation where text of the client cannot become a special token."""
        messages = fields.messages or []
        self._ignored_keys.note(key for message in messages for key in message.ignored_keys())
        _check_roles(messages, template, literals)
        variables = literals.mark(fields.chat_template_kwargs)
        if fields.reasoning_effort is not None:
            variables = {**variables, "reasoning_effort": fields.reasoning_effort}
        turns: Sequence[Turn] = [literals.mark(message.for_template()) for message in messages]
        names = [f"messages.{index}" for index in range(len(turns))]
        tools = literals.mark(fields.tools_for_template())
        if tools is not None and not template.knows_tools:
            turns, tools = with_offer(turns, tools), None
            names = ["tools"][: len(turns) - len(names)] + names
        return Conversation(
            template,
            turns,
            names,
            tools,
            variables,
            add_generation_prompt=fields.add_generation_prompt,
            is_continued=fields.continue_final_message,
        )


def _check_roles(messages: Sequence[Message], template: ChatTemplate, literals: Literals) -> None:
    """Raise a 400 for a role that is part of a special token, because a template would write it into one."""
    for role in {message.role for message in messages} - KNOWN_ROLES:
        if literals.is_part(role) and not template.names(role):
            message = f"messages: the role {role!r} is not supported: it is a part of a special token"
            raise bad_request(message, "messages")


def _is_large(fields: ChatFields | TokenizeFields) -> bool:
    """Return whether the preparation of a conversation may take more than a millisecond."""
    messages = fields.messages or []
    if len(messages) > _MANY_MESSAGES or fields.tools or fields.chat_template_kwargs:
        return True
    return sum(len(part.text) for message in messages for part in message.content) > _LONG_TEXT


async def _done(is_large: bool, work: Callable[[], T]) -> T:
    """Return the result of some work, which is done in a thread if it is large."""
    return await asyncio.to_thread(work) if is_large else work()
