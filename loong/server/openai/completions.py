"""`/v1/completions`, and the path from a request to its answer for both kinds of completion."""

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from aiohttp import web

from loong.core.events import Logprobs
from loong.core.grammar import Grammar
from loong.core.request import SLO, NewRequest, TokenId
from loong.engine.client import RequestLoad
from loong.server.api.api_keys import KEY_NUMBER, user_of
from loong.server.api.json_bodies import read_fields
from loong.server.api.request_ids import new_id, note_answer_id
from loong.server.context import SERVER, Server
from loong.server.openai.answer import (
    AnswerShape,
    Json,
    NewShape,
    ResponseContext,
    finish_fields,
    name_by_id,
    send_stream,
    send_whole,
)
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
from loong.server.structured.asked_grammar import AskedGrammar, asked_grammar
from loong.server.text.echo_offsets import echo_offsets


class _Row(NamedTuple):
    """A token with its log probabilities, and the offset of its text."""

    token_id: TokenId
    logprobs: Logprobs | None  # None: the first token, which has none
    text_offset: int


class CompletionShape(AnswerShape):
    """A text completion."""

    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def whole_choice(self, deltas: Sequence[Delta]) -> Json:
        """Return one choice with all tokens."""
        return self._choice(deltas)

    def chunks(self, delta: Delta, num_output_tokens: int) -> Iterator[Json]:
        """Yield one event for each token."""
        yield self.chunk_envelope(self._choice([delta]), num_output_tokens)

    def _choice(self, deltas: Sequence[Delta]) -> Json:
        """Return some deltas of one choice. The first has the prompt's fields."""
        first, last = deltas[0], deltas[-1]
        text = "".join(delta.text for delta in deltas)
        fields: Json = {"index": last.choice, "text": text, "logprobs": self._logprobs(deltas)}
        if first.index == 0:
            fields["text"] = self.asked.choices[first.choice].echo + text
            fields |= self.prompt_token_ids(first.choice) | self.prompt_logprobs(first)
        return fields | finish_fields(deltas[-1]) | self.token_ids(deltas)

    def _logprobs(self, deltas: Sequence[Delta]) -> Json | None:
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
        return {
            "tokens": [name(row.token_id) for row in rows],
            "token_logprobs": [row.logprobs and row.logprobs.chosen for row in rows],
            "top_logprobs": [row.logprobs and self._top_logprobs(row.token_id, row.logprobs) for row in rows],
            "text_offset": [row.text_offset for row in rows],
        }

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
    by_prompt = await _choices(server, fields, prompts, answer_id, user, held_to and held_to.grammar)
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
    options = _output_options(server, fields, prompts[0], held_to)
    requests = [choices.request for choices in by_prompt]
    num_prompt_tokens = {request.request_id: len(request.prompt_token_ids) for request in requests}
    async with server.engine.admit(RequestLoad(num_prompt_tokens, fields.n, http.get(KEY_NUMBER))):
        deltas = generate_choices(server, by_prompt, options, arrived_at)
        if fields.stream:
            return await send_stream(http, server, shape, deltas)
        return await send_whole(shape, deltas)


def _output_options(
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


async def _choices(
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
        )
        choices.append(Choices(index * fields.n, request, prompt.echo))
    return choices
