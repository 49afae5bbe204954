"""Prompts of conversations are those of transformers, unless those leave out something."""

import json
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from conversations import CONVERSATIONS, TOOLS, Turn
from jinja2 import TemplateError
from template_styles import STYLES
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from loong.core.errors import InvalidRequestError
from loong.server.api.errors import ApiError
from loong.server.api.parsing import check
from loong.server.openai.chat_prompts import ChatPrompts
from loong.server.openai.schemas import ChatFields
from loong.server.text.chat_template import ChatTemplate
from loong.server.text.template_process import Outcome
from loong.server.text.tokenizer import Tokenizer

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
ASK: Turn = {"role": "user", "content": "Ask?"}


class Written:
    """Prompts by one template, with and without loong."""

    def __init__(self, tokenizer: Tokenizer, source: str) -> None:
        assert tokenizer.folder is not None
        backend = Backend.from_file(str(tokenizer.folder / "tokenizer.json"))
        self.template = ChatTemplate(source, SPECIAL_TOKENS)
        self._tokenizer = Tokenizer(backend, chat_template=self.template)
        self.prompts = ChatPrompts(self._tokenizer)
        self._reference = PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL_TOKENS)
        self._reference.chat_template = source

    async def ours(self, messages: Sequence[Turn], **fields: Any) -> str:
        """Return the prompt of a server. Raises its 400."""
        asked = check({"messages": messages, **fields}, ChatFields)
        return await self._tokenizer.text(await self.prompts.token_ids(asked))

    def theirs(self, messages: Sequence[Turn], *, add_generation_prompt: bool = True, **others: Any) -> str:
        """Return the prompt of transformers. Raises what the template raises."""
        return str(
            self._reference.apply_chat_template(
                [*map(_with_objects, messages)],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **others,
            )
        )


def _with_objects(turn: Turn) -> Turn:
    """Return a turn as transformers expects it: arguments of calls are objects, and contents texts."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in turn.get("tool_calls", [])
    ]
    return {**turn, "content": turn["content"] or "", **({"tool_calls": calls} if calls else {})}


@asynccontextmanager
async def written_by(tokenizer: Tokenizer, source: str) -> AsyncIterator[Written]:
    written = Written(tokenizer, source)
    try:
        yield written
    finally:
        await written.prompts.close()


def texts_of(messages: Sequence[Turn]) -> Iterator[str]:
    """Yield what no prompt may lack."""
    for turn in messages:
        for call in turn.get("tool_calls", []):
            yield json.loads(call["function"]["arguments"])["what"]
        content = turn["content"] or ""
        texts = [part["text"] for part in content] if isinstance(content, list) else [content]
        yield from (text.split("</think>")[-1].strip() for text in texts if "tool_calls" not in turn)


def has_all(prompt: str, messages: Sequence[Turn]) -> bool:
    return "'text': '" not in prompt and all(text in prompt for text in texts_of(messages))


@pytest.mark.parametrize("style", STYLES)
async def test_prompts_are_those_of_transformers_where_these_leave_nothing_out(
    tokenizer: Tokenizer, style: str
) -> None:
    num_equal = 0
    async with written_by(tokenizer, STYLES[style]) as written:
        for name, messages in CONVERSATIONS.items():
            tools = TOOLS if "call" in name else None
            try:
                theirs = written.theirs(messages, tools=tools)
            except (TemplateError, TypeError):
                theirs = ""
            try:
                ours = await written.ours(messages, tools=tools)
            except (ApiError, InvalidRequestError):
                ours = ""
            is_whole = has_all(theirs, messages) and (tools is None or written.template.knows_tools)
            assert ours == theirs if is_whole else ours == "" or has_all(ours, messages), name
            num_equal += is_whole
    assert num_equal > 0


LAW = {"role": "developer", "content": "Law."}
RULE = {"role": "system", "content": "Rule."}
WELL = {"role": "assistant", "content": "Well."}


@pytest.mark.parametrize(
    ("style", "messages", "prompt"),
    [
        ("chatml", [LAW, ASK], "<|im_start|>developer\nLaw.<|im_end|>\n<|im_start|>user\nAsk?<|im_end|>\n"),
        ("thinking", [LAW, ASK], "<|im_start|>system\nLaw.<|im_end|>\n<|im_start|>user\nAsk?<|im_end|>\n"),
        (
            "thinking",
            [RULE, LAW, ASK],
            "<|im_start|>system\nRule.\n\nLaw.<|im_end|>\n<|im_start|>user\nAsk?<|im_end|>\n",
        ),
        (
            "thinking",
            [ASK, LAW, ASK],
            "".join(
                f"<|im_start|>{turn}<|im_end|>\n" for turn in ("user\nAsk?", "system\nLaw.", "user\nAsk?")
            ),
        ),
        ("known_roles", [LAW, ASK], "<|system|>\nLaw.</s>\n<|user|>\nAsk?</s>\n"),
        ("one_system", [RULE, {**RULE, "content": "Law."}, ASK], "<s>Rule.\n\nLaw.<|User|>Ask?"),
        ("instructions", [LAW, ASK], "<s>[INST] <<SYS>>\nLaw.\n<</SYS>>\n\nAsk? [/INST]\n"),
        ("last_user", [LAW, ASK], "<s>[INST] Law.\n\nAsk?[/INST]"),
        (
            "last_user",
            [RULE, ASK, WELL, {**LAW, "role": "user"}, WELL],
            "<s>[INST] Rule.\n\nAsk?[/INST] Well.</s>[INST] Law.[/INST] Well.</s>",
        ),
    ],
)
async def test_system_turns_are_given_so_that_the_template_takes_them(
    tokenizer: Tokenizer, style: str, messages: Sequence[Turn], prompt: str
) -> None:
    async with written_by(tokenizer, STYLES[style]) as written:
        assert await written.ours(messages, add_generation_prompt=False) == prompt


@pytest.mark.parametrize(
    ("style", "messages", "why"),
    [
        ("no_system", [RULE, ASK], "refuses these messages: System role not supported"),
        ("no_system", [LAW, ASK], "refuses these messages: Conversation roles must alternate"),
        ("macros", [ASK, {"role": "critic", "content": "Boo."}], r"messages\.1: .* the role 'critic' out"),
        ("one_system", [ASK, RULE, ASK, RULE, ASK], r"messages\.1: .* the role 'system' out"),
        ("instructions", [RULE], r"messages\.0: .* the role 'system' out"),
    ],
)
async def test_a_turn_that_no_arrangement_keeps_is_named(
    tokenizer: Tokenizer, style: str, messages: Sequence[Turn], why: str
) -> None:
    async with written_by(tokenizer, STYLES[style]) as written:
        with pytest.raises((ApiError, InvalidRequestError), match=why):
            await written.ours(messages)


@pytest.mark.parametrize(
    ("source", "name", "field"),
    [
        ("{{ messages[0].content }}{{ tools and '' }}", "one turn", "tools"),
        ("{{ messages | map(attribute='content') | join }}{{ tools }}", "a call", r"messages\.1\.tool_calls"),
        (
            "{{ messages[:-1] }}{{ tools }}",
            "a call",
            r"messages\.2",
        ),
    ],
)
async def test_tools_calls_and_results_that_a_template_leaves_out_are_named(
    tokenizer: Tokenizer, source: str, name: str, field: str
) -> None:
    async with written_by(tokenizer, source) as written:
        with pytest.raises(ApiError, match=f"^{field}: the model's chat template leaves"):
            await written.ours(CONVERSATIONS[name], tools=TOOLS)


async def test_a_text_before_calls_may_be_left_out_with_a_warning(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    async with written_by(tokenizer, STYLES["last_user"]) as written:
        for _ in range(2):
            prompt = await written.ours(CONVERSATIONS["a call with a text"], tools=TOOLS)
            assert "Let me see." not in prompt
        assert [record.message for record in caplog.records] == [
            "the model's chat template leaves out what assistants write before tool calls"
        ]


async def test_an_arrangement_is_found_once_for_conversations_of_one_structure(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with written_by(tokenizer, STYLES["thinking"]) as written:
        await written.ours([RULE, LAW, ASK, WELL, ASK])
        asked: list[bytes] = []
        answer = written.prompts._renderer.answer

        def note(request: bytes) -> Awaitable[tuple[Outcome, str]]:
            asked.append(request)
            return answer(request)

        monkeypatch.setattr(written.prompts._renderer, "answer", note)
        other = [RULE, LAW, {"role": "user", "content": "Or else?"}, WELL, ASK]
        assert "Or else?" in await written.ours(other)
        assert len(asked) == 1


@pytest.mark.parametrize("style", sorted({*STYLES} - {"no_system"}))
@pytest.mark.parametrize("ending", ["Well", "Well,  ", [{"type": "text", "text": "Well"}], ""])
async def test_a_message_is_continued_as_by_transformers(
    tokenizer: Tokenizer, style: str, ending: object
) -> None:
    messages = [ASK, {"role": "assistant", "content": ending}]
    fields = {"add_generation_prompt": False, "continue_final_message": True}
    async with written_by(tokenizer, STYLES[style]) as written:
        ours = await written.ours(messages, **fields)
        assert ours.rstrip().endswith(("Well", "Well,") if ending else ours.rstrip())
        try:
            theirs = written.theirs(messages, **fields)
        except (TemplateError, TypeError, ValueError):
            return
        if has_all(theirs, messages):
            assert ours == theirs


async def test_a_message_that_the_template_changes_is_not_continued(tokenizer: Tokenizer) -> None:
    fields = {"add_generation_prompt": False, "continue_final_message": True}
    for source in (
        "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
        "{% for m in messages %}{{ m.content[:18] }}{% endfor %}",
    ):
        async with written_by(tokenizer, source) as written:
            with pytest.raises((ApiError, InvalidRequestError), match=r"^continue_final_message: "):
                await written.ours([ASK, {"role": "assistant", "content": "Well done, and so on"}], **fields)


def test_a_continued_message_goes_without_a_generation_prompt() -> None:
    with pytest.raises(ApiError, match=r"continue_final_message: .* add_generation_prompt set to false"):
        check({"messages": [ASK, WELL], "continue_final_message": True}, ChatFields)


async def test_a_template_sees_the_effort_and_other_variables(tokenizer: Tokenizer) -> None:
    source = "{{ reasoning_effort }}{{ mood }}{{ messages[0].content }}"
    async with written_by(tokenizer, source) as written:
        prompt = await written.ours([ASK], reasoning_effort="low", chat_template_kwargs={"mood": "!"})
        assert prompt == "low!Ask?"
