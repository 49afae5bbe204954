"""`/v1/completions`, and the path from a request to its answer for both kinds of completion."""

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from aiohttp import web
from msgspec import UNSET, UnsetType

from loong.core.events import Logprobs
from loong.core.grammar import Grammar
from loong.core.request import SLO, NewRequest, TokenId
from loong.engine.client import RequestLoad
from loong.server.answers.completions import Completion, CompletionChoice, CompletionLogprobs, Usage
from loong.server.api.api_keys import KEY_NUMBER, user_of
from loong.server.api.json_bodies import read_fields
from loong.server.api.request_ids import new_id, note_answer_id
from loong.server.api.sse import event_of
from loong.server.context import SERVER, Server
from loong.server.openai.answer import (
    AnswerShape,
    NewShape,
    ResponseContext,
    finish_reason_of,
    name_by_id,
    send_stream,
    send_whole,
)
from loong.server.openai.asked_grammar import AskedGrammar, asked_grammar
from loong.server.openai.bad_words import bad_word_ids
from loong.server.openai.choices import Choices, generate_choices
from loong.server.openai.output import Delta, OutputOptions
from loong.server.openai.parameters import (
    max_output_tokens,
    num_asked_tokens,
    num_prompt_logprobs,
    sampling_params,
)
from loong.server.openai.prompts import Prompt, completion_prompts
from loong.server.openai.schemas import CompletionFields, GenerationFields
from loong.server.openai.truncation import truncated
from loong.server.text.echo_offsets import echo_offsets


class _Row(NamedTuple):
    """A token with its log probabilities, and the offset of its text."""

    token_id: TokenId
    logprobs: Logprobs | None  # None: the first token, which has none
    text_offset: int


class CompletionShape(AnswerShape):
    """A text completion."""

    id_prefix = "cmpl"

    def whole(self, deltas: Sequence[Delta]) -> Completion:
        """Return the answer with all tokens of all choices."""
        choices = [self._choice(reported) for reported in self.by_choice(deltas)]
        return self._completion(choices, self.usage(len(deltas)))

    def chunks(self, delta: Delta, num_output_tokens: int) -> Iterator[Completion]:
        """Yield one event for each token."""
        yield self._completion([self._choice([delta])], self.chunk_usage(num_output_tokens))

    def closing(self, num_output_tokens: int) -> bytes:
        """Return the event with the token counts, if the request wants it."""
        if not self.asked.stream_options.include_usage:
            return b""
        return event_of(self._completion([], self.usage(num_output_tokens)))

    def _completion(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        asked = self.asked
        return Completion(asked.answer_id, asked.created, asked.model, choices, usage)

    def _choice(self, deltas: Sequence[Delta]) -> CompletionChoice:
        """Return some deltas of one choice. The first has the prompt's fields."""
        first, last = deltas[0], deltas[-1]
        is_first = first.index == 0
        echo = self.asked.choices[first.choice].echo if is_first else ""
        return CompletionChoice(
            last.choice,
            echo + "".join(delta.text for delta in deltas),
            self._logprobs(deltas),
            finish_reason_of(last),
            last.stop_reason,
            self.token_ids(deltas),
            self.prompt_token_ids(first.choice) if is_first else UNSET,
            self.prompt_logprobs(first) if is_first else UNSET,
        )

    def _logprobs(self, deltas: Sequence[Delta]) -> CompletionLogprobs | None:
        """Return columns with an entry for each token, those of an echoed prompt first, or None for no
        entries.
        """
        rows = self._echoed(deltas[0]) if deltas[0].index == 0 else []
        num_echoed = len(self.asked.choices[deltas[0].choice].echo)
        rows += [
            _Row(delta.token_id, delta.logprobs, num_echoed + delta.text_offset)
            for delta in deltas
            if delta.logprobs is not None
        ]
        if not rows:
            return None
        name = self.token_name
        return CompletionLogprobs(
            [name(row.token_id) for row in rows],
            [None if row.logprobs is None else row.logprobs.chosen for row in rows],
            [
                None if row.logprobs is None else self._top_logprobs(row.token_id, row.logprobs)
                for row in rows
            ],
            [row.text_offset for row in rows],
        )

    def _echoed(self, first: Delta) -> "list[_Row]":
        if (count := self.asked.num_echoed_logprobs) is None:
            return []
        choices, found = self.asked.choices[first.choice], first.prompt_logprobs
        prompt = choices.request.prompt_token_ids
        logprobs: list[Logprobs | None] = [None]
        if found is not None:
            tops = (tuple(found.top_at(index, count)) for index in range(len(prompt) - 1))
            logprobs += map(Logprobs, found.chosen, tops)
        return list(map(_Row, prompt, logprobs, echo_offsets(self.tokenizer, prompt, choices.echo)))

    def _top_logprobs(self, chosen_id: TokenId, logprobs: Logprobs) -> dict[str, float]:
        """Return the log probabilities of the likeliest tokens and of the chosen one, by text.

        Among tokens with equal text, the chosen one gets the name, or else the likeliest one. The others are
        named by their ids, as vLLM does with `return_tokens_as_token_ids`.
        """
        chosen = self.token_name(chosen_id)
        found: dict[str, float] = {}
        for token_id, logprob in logprobs.top:
            text = self.token_name(token_id)
            is_taken = text in found or (text == chosen and token_id != chosen_id)
            found[name_by_id(token_id) if is_taken else text] = logprob
        return found if chosen in found else found | {chosen: logprobs.chosen}


async def completions(http: web.Request) -> web.StreamResponse:
    """Complete each prompt of a request."""
    arrived_at = time.monotonic()
    server = http.app[SERVER]
    fields = await read_fields(http, CompletionFields)
    server.check_model(fields.model)
    prompts = await completion_prompts(fields, server.tokenizer, server.engine.limits.vocab_size)
    return await complete(http, fields, prompts, CompletionShape, arrived_at)


async def complete(
    http: web.Request,
    fields: GenerationFields,
    prompts: Sequence[Prompt],
    new_shape: NewShape,
    arrived_at: float,
) -> web.StreamResponse:
    """Check, admit and run a request, and send its answer in the endpoint's shape, with `n` choices a
    prompt.
    """
    server = http.app[SERVER]
    answer_id = f"{new_shape.id_prefix}-{new_id()}"
    note_answer_id(http, answer_id)
    user = user_of(http, fields.user, len(server.settings.api_keys))
    prompts = await truncated(prompts, fields, server.tokenizer, server.engine.limits)
    held_to = asked_grammar(fields, prompts[0].tools, server.tokenizer.eos_token_ids)
    by_prompt = await choices_of(server, fields, prompts, answer_id, user, held_to and held_to.grammar)
    asked = ResponseContext(
        answer_id,
        server.name_in_answers(fields.model),
        int(time.time()),
        choices=tuple(choices for choices in by_prompt for _ in range(fields.n)),
        num_prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts),
        return_token_ids=fields.return_token_ids,
        are_tokens_named_by_id=fields.return_tokens_as_token_ids,
        stream_options=fields.stream_options,
        num_prompt_logprobs=fields.prompt_logprobs,
        num_echoed_logprobs=fields.num_echoed_logprobs,
        is_prompt_only=num_asked_tokens(fields) == 0,
    )
    if held_to is not None:
        await server.grammars.check(held_to.grammar, held_to.field)
    shape = new_shape(asked, server.tokenizer)
    options = output_options(server, fields, prompts[0], held_to)
    requests = [choices.request for choices in by_prompt]
    num_prompt_tokens = {request.request_id: len(request.prompt_token_ids) for request in requests}
    async with server.engine.admit(RequestLoad(num_prompt_tokens, fields.n, http.get(KEY_NUMBER))):
        deltas = generate_choices(server, by_prompt, options, arrived_at)
        if fields.stream:
            return await send_stream(http, server, shape, deltas)
        return await send_whole(shape, deltas)


def output_options(
    server: Server, fields: GenerationFields, prompt: Prompt, held_to: AskedGrammar | None
) -> OutputOptions:
    """Return the options that turn the tokens of all answers into text."""
    tools = prompt.tools
    limiting = {"allowed_token_ids": fields.allowed_token_ids, "bad_words": fields.bad_words}
    return OutputOptions(
        tuple(fields.stop),
        tuple(fields.stop_token_ids),
        includes_stop=fields.include_stop_str_in_output,
        skip_special_tokens=fields.skip_special_tokens,
        is_prompt_only=num_asked_tokens(fields) == 0,
        grammar_field=held_to and held_to.field,
        limiting_fields=tuple(name for name, value in limiting.items() if value),
        tools=tools,
        kept_token_ids=frozenset()
        if tools is None
        else server.tokenizer.special_token_ids(tools.form.markers),
    )


async def choices_of(
    server: Server,
    fields: GenerationFields,
    prompts: Sequence[Prompt],
    answer_id: str,
    user: str,
    grammar: Grammar | None,
) -> list[Choices]:
    """Return the engine's requests for all prompts, checked against the limits."""
    limits, eos_token_ids = server.engine.limits, server.tokenizer.eos_token_ids
    num_scored, choices = num_prompt_logprobs(fields, prompts), []
    bad_words = await bad_word_ids(fields.bad_words, server.tokenizer, limits.vocab_size)
    for index, prompt in enumerate(prompts):
        params = sampling_params(
            fields,
            max_tokens=max_output_tokens(fields, prompt, limits),
            eos_token_ids=eos_token_ids,
            vocab_size=limits.vocab_size,
            grammar=grammar,
            bad_words=bad_words,
        )
        request_id = answer_id if len(prompts) == 1 else f"{answer_id}-{index}"
        request = NewRequest(
            request_id,
            tuple(prompt.token_ids),
            params,
            slo=None if fields.slo is None else SLO(fields.slo.ttft, fields.slo.tpot),
            user=user,
            num_choices=fields.n,
            priority=fields.priority,
            num_prompt_logprobs=num_scored,
            cache_salt=fields.salt_digest,
            uses_cache=fields.use_prefix_cache,
        )
        choices.append(Choices(index * fields.n, request, prompt.echo))
    return choices
