"""Prompts in all forms of the API, as token ids."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from loong.core.errors import InvalidRequestError
from loong.core.request import TokenId
from loong.server.api.errors import bad_request
from loong.server.api.ignored_keys import IgnoredKeys
from loong.server.openai.messages import KNOWN_ROLES, Message
from loong.server.openai.schemas import MAX_PROMPTS, ChatFields, CompletionFields, TokenizeFields
from loong.server.text.chat_template import ChatTemplate
from loong.server.text.special_tokens import Literals
from loong.server.text.tokenizer import Tokenizer
from loong.server.tools.plain_turns import plain_turns
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
    lists = [prompt for prompt in prompts if isinstance(prompt, list) and await _are_integers(prompt)]
    if len(texts) == len(prompts):
        return await tokenizer.encode_all(texts, add_special_tokens=add_special_tokens)
    if len(lists) == len(prompts):  # bools are ints, but not token ids
        return lists
    what = "a string, a list of token ids, or a list of strings or of lists of token ids"
    raise bad_request(f"prompt must be {what}", "prompt")


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


async def chat_prompt(
    fields: ChatFields | TokenizeFields, tokenizer: Tokenizer, ignored_keys: IgnoredKeys, ending: str = ""
) -> list[TokenId]:
    """Return the token ids of a conversation by the model's chat template, which writes special tokens
    itself.

    They end with `ending`, the beginning of the answer.
    """
    template = tokenizer.chat_template if fields.tools_for_template() is None else tokenizer.tool_template
    if template is None:
        message = "this model has no chat template; send its prompt to /v1/completions"
        raise bad_request(message, "messages", "no_chat_template")
    pieces = await asyncio.to_thread(_rendered, fields, template, tokenizer.literals(), ignored_keys)
    if ending:
        pieces.append((ending, False))
    return await tokenizer.encode_pieces(pieces, add_special_tokens=bool(fields.add_special_tokens))


def _rendered(
    fields: ChatFields | TokenizeFields,
    template: ChatTemplate,
    literals: Literals,
    ignored_keys: IgnoredKeys,
) -> list[tuple[str, bool]]:
    """Return what the template writes, where text of the client cannot become a special token."""
    messages: Sequence[Message] = fields.messages or []
    ignored_keys.note(key for message in messages for key in message.ignored_keys())
    _check_roles(messages, template, literals)
    conversation = _Conversation(
        template,
        [literals.mark(message.for_template()) for message in messages],
        literals.mark(fields.tools_for_template()),
        literals.mark(fields.chat_template_kwargs),
        add_generation_prompt=fields.add_generation_prompt,
    )
    text = conversation.text()
    for role in dict.fromkeys(message.role for message in messages):
        if role not in KNOWN_ROLES and not conversation.takes(role, text):
            raise bad_request(f"messages: the chat template takes no turns of the role {role!r}", "messages")
    return list(literals.pieces(text))


def _check_roles(messages: Sequence[Message], template: ChatTemplate, literals: Literals) -> None:
    """Raise a 400 for a role that is part of a special token, because a template would write it into one."""
    for role in {message.role for message in messages} - KNOWN_ROLES:
        if literals.is_part(role) and not template.names(role):
            message = f"messages: the role {role!r} is not supported: it is a part of a special token"
            raise bad_request(message, "messages")


@dataclass(frozen=True, slots=True)
class _Conversation:
    """The input of a chat template."""

    template: ChatTemplate
    turns: Sequence[Mapping[str, object]]
    tools: Sequence[object] | None
    variables: Mapping[str, object]
    add_generation_prompt: bool

    def takes(self, role: str, text: str) -> bool:
        """Return whether turns of a role appear in the whole text."""
        try:
            return self.text(without=role) != text
        except InvalidRequestError:  # the template requires these turns
            return True

    def text(self, without: str | None = None) -> str:
        """Return the template's text, without the turns of one role."""
        turns = [turn for turn in self.turns if turn["role"] != without]
        tools = self.tools
        if not self.template.knows_tools:
            turns, tools = plain_turns(turns, tools), None
        return self.template.render(
            turns,
            tools=tools,
            variables=self.variables,
            add_generation_prompt=self.add_generation_prompt,
        )


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
