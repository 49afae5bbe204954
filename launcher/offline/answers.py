"""One prompt of `LLM`: its request to the engine, and its tokens until all choices have ended."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from loong.core.cached_tokens import CachedTokens
from loong.core.errors import InvalidRequestError, LoongError
from loong.core.events import ProducedToken
from loong.core.prompt_logprobs import PromptLogprobs
from loong.core.request import NewRequest, RequestId
from loong.engine.client import Answered
from loong.launcher.offline.outputs import CompletionOutput, Logprob, RequestOutput
from loong.launcher.offline.prompts import GivenPrompt
from loong.server.api.errors import ApiError
from loong.server.context import Server
from loong.server.openai.asked_grammar import asked_grammar
from loong.server.openai.completions import choices_of, output_options
from loong.server.openai.output import Delta, Output, OutputOptions
from loong.server.openai.prompts import Prompt, check_prompt_ids
from loong.server.openai.schemas import CompletionFields
from loong.server.openai.truncation import truncated
from loong.server.text.tokenizer import Tokenizer


class OfflineFields(CompletionFields):
    """The fields of a completion without a default for `max_tokens`: all that fit."""

    default_max_tokens = None


class Job(NamedTuple):
    """A prompt to answer. `name` is its name in errors."""

    request_id: RequestId
    name: str
    prompt: GivenPrompt
    fields: OfflineFields


@contextmanager
def invalid_requests() -> Iterator[None]:
    """Raise errors of the HTTP API as `InvalidRequestError`."""
    try:
        yield
    except ApiError as error:
        raise InvalidRequestError(str(error), param=error.param) from None


@dataclass(slots=True)
class Answer:
    """The tokens of one prompt as the engine produces them, by choice.

    `on_end` is called once, when all choices have ended or the request has failed. Texts are made afterwards,
    by `output`, unless stop strings may end a choice earlier.
    """

    server: Server
    prompt: str | None
    request: NewRequest
    options: OutputOptions
    on_end: Callable[["Answer"], None]
    error: LoongError | None = None
    _tokens: dict[RequestId, list[ProducedToken]] = field(init=False)
    _outputs: dict[RequestId, Output] = field(init=False)
    _deltas: dict[RequestId, list[Delta]] = field(init=False)
    _open: set[RequestId] = field(init=False)
    _prompt_logprobs: PromptLogprobs | None = None
    _num_cached_tokens: int = 0

    def __post_init__(self) -> None:
        ids = self.request.choice_ids
        self._tokens, self._deltas, self._open = {i: [] for i in ids}, {i: [] for i in ids}, set(ids)
        self._outputs = {
            choice_id: Output(self.request, self.options, self.server.tokenizer, number)
            for number, choice_id in enumerate(ids)
        }

    @property
    def num_tokens(self) -> int:
        """The number of tokens so far, of all choices."""
        return sum(map(len, self._tokens.values()))

    def submit(self) -> None:
        """Begin the request."""
        self.server.engine.submit(self.request, self._take)

    def abort(self) -> None:
        """End all choices, unless they have ended."""
        for choice_id in self._open:
            self.server.engine.abort(choice_id)
        self._open.clear()

    def output(self) -> RequestOutput:
        """Return the whole answer. Raises the error that ended it."""
        if self.error is not None:
            raise self.error
        scored = self._scored(self.server.tokenizer)
        outputs = [self._choice(i, number) for number, i in enumerate(self.request.choice_ids)]
        ids = list(self.request.prompt_token_ids)
        cached = self._num_cached_tokens
        return RequestOutput(self.request.request_id, self.prompt, ids, outputs, scored, cached)

    def _take(self, answered: Answered) -> None:
        """Take what the engine has for the request."""
        if not self._open:
            return
        if isinstance(answered, LoongError):
            self._fail(answered)
        elif isinstance(answered, PromptLogprobs):
            self._prompt_logprobs = answered
        elif isinstance(answered, CachedTokens):
            self._num_cached_tokens = answered.num_tokens
        elif answered.request_id in self._open:
            self._add(answered)

    def _add(self, token: ProducedToken) -> None:
        choice_id = token.request_id
        self._tokens[choice_id].append(token)
        if self.options.stop_strings and token.finish_reason is None:
            delta = self._delta(token)
            if delta is None or delta.finish_reason is None:
                return
            self.server.engine.abort(choice_id, delta.finish_reason)
        elif token.finish_reason is None:
            return
        self._open.discard(choice_id)
        if not self._open and self.error is None:
            self.on_end(self)

    def _delta(self, token: ProducedToken) -> Delta | None:
        """Return what a token adds to its choice, or None if the request has failed by it."""
        try:
            delta = self._outputs[token.request_id].add(token)
        except LoongError as error:
            self._fail(error)
            return None
        self._deltas[token.request_id].append(delta)
        return delta

    def _fail(self, error: LoongError) -> None:
        if self.error is None:
            self.error = error
            self.abort()
            self.on_end(self)

    def _choice(self, choice_id: RequestId, number: int) -> CompletionOutput:
        tokens, deltas = self._tokens[choice_id], self._deltas[choice_id]
        for token in tokens[len(deltas) :]:
            deltas.append(self._outputs[choice_id].add(token))
        last = deltas[-1]
        reported = [delta for delta in deltas if delta.logprobs is not None]
        logprobs = [self._ranked(delta) for delta in reported] or None
        total = sum(delta.logprobs.chosen for delta in reported if delta.logprobs is not None)
        return CompletionOutput(
            number,
            "".join(delta.text for delta in deltas),
            [token.token_id for token in tokens],
            total if reported else None,
            logprobs,
            last.finish_reason and last.finish_reason.value,
            last.stop_reason,
        )

    def _ranked(self, delta: Delta) -> dict[int, Logprob]:
        """Return the likeliest tokens at a position and the chosen one, by id."""
        assert delta.logprobs is not None
        name = self.server.tokenizer.token_name
        top = enumerate(delta.logprobs.top, 1)
        found = {i: Logprob(logprob, rank, name(i)) for rank, (i, logprob) in top}
        chosen = Logprob(delta.logprobs.chosen, None, name(delta.token_id))
        return found if delta.token_id in found else {delta.token_id: chosen} | found

    def _scored(self, tokenizer: Tokenizer) -> list[dict[int, Logprob] | None] | None:
        """Return the log probabilities of the prompt's tokens, if the request asks for them."""
        count = self.request.num_prompt_logprobs
        if count is None:
            return None
        found: list[dict[int, Logprob] | None] = [None]
        columns, ids = self._prompt_logprobs, self.request.prompt_token_ids
        for index in range(len(ids) - 1 if columns is not None else 0):
            assert columns is not None
            name = tokenizer.token_name
            top = enumerate(columns.top_at(index, count), 1)
            own = Logprob(columns.chosen[index], columns.ranks[index], name(ids[index + 1]))
            likely = {i: Logprob(logprob, rank, name(i)) for rank, (i, logprob) in top}
            found.append({ids[index + 1]: own} | likely)
        return found


async def answer_of(server: Server, job: Job, on_end: Callable[[Answer], None]) -> Answer:
    """Return the answer to a prompt, not submitted. Raises `InvalidRequestError`, which names the prompt."""
    with invalid_requests():
        return await _answer_of(server, job, on_end)


async def _answer_of(server: Server, job: Job, on_end: Callable[[Answer], None]) -> Answer:
    limits, tokenizer, fields, token_ids = (
        server.engine.limits,
        server.tokenizer,
        job.fields,
        job.prompt.token_ids,
    )
    if token_ids is None:
        text = job.prompt.text or ""
        token_ids = await tokenizer.encode(text, add_special_tokens=fields.add_special_tokens)
    if not token_ids:
        raise InvalidRequestError(f"{job.name} is empty; it needs at least one token", param="prompts")
    await check_prompt_ids(job.name, token_ids, limits.vocab_size, "prompts")
    (prompt,) = await truncated([Prompt(job.name, token_ids)], fields, tokenizer, limits)
    held_to = asked_grammar(fields, None, tokenizer.eos_token_ids)
    if held_to is not None:
        await server.grammars.check(held_to.grammar, held_to.field)
    (choices,) = await choices_of(server, fields, [prompt], job.request_id, "", held_to and held_to.grammar)
    options = output_options(server, fields, prompt, held_to)
    return Answer(server, job.prompt.text, choices.request, options, on_end)
