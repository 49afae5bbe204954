"""An engine without a model, for tests of the layers above an engine: it gives scripted answers."""

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TypeAlias

from loong.core.cached_tokens import CachedTokens
from loong.core.cluster_history import ClusterHistory
from loong.core.errors import ClusterError, InvalidRequestError, LoongError, RequestTooLargeError
from loong.core.events import Logprobs, ProducedToken
from loong.core.instance import ElasticInstance, InstanceKind
from loong.core.limits import MAX_LOGPROBS
from loong.core.prompt_logprobs import PromptLogprobs
from loong.core.request import FinishReason, NewRequest, TokenId
from loong.core.snapshot import Snapshot
from loong.engine.client import EngineLimits, PutToken
from loong.engine.cluster_size import ClusterSize, size_of
from loong.engine.health import Health
from loong.engine.largest_prefixes import CachedPrefix
from loong.engine.prefix_hits import PrefixCounts

SMALL = EngineLimits(max_model_len=2048, max_request_kv=4096, vocab_size=264)
AT_REST = Snapshot(0.0, (ElasticInstance(0, 1, InstanceKind.FULL, 4096),))

Reply: TypeAlias = Callable[[NewRequest], Sequence[TokenId]]
Serving: TypeAlias = Callable[..., AbstractAsyncContextManager[str]]  # (engine, **settings) -> address


def repeat_the_prompt(request: NewRequest) -> Sequence[TokenId]:
    """Return the prompt, over and over."""
    prompt = request.prompt_token_ids
    return [prompt[i % len(prompt)] for i in range(request.sampling_params.max_tokens)]


def say(text: str) -> Reply:
    """Return a reply of the bytes of `text`, for a tokenizer whose ids are bytes."""
    return lambda request: [*text.encode()]


def chosen_and_others(token_id: TokenId) -> Sequence[tuple[TokenId, float]]:
    """Return the likeliest tokens, the chosen one first."""
    return [(token_id ^ i, -0.5 - i) for i in range(MAX_LOGPROBS)]


def prompt_logprobs(request: NewRequest) -> PromptLogprobs:
    """Return what is said of a prompt: the token at position p has -p, and rank 2 behind the next id."""
    count, prompt = request.num_prompt_logprobs or 0, request.prompt_token_ids
    tops = [[(t + 1, -0.125), (t, -float(p)), *chosen_and_others(t)[2:]] for p, t in enumerate(prompt)][1:]
    return PromptLogprobs(
        request.request_id,
        range(1, len(prompt)),
        [-float(p) for p in range(1, len(prompt))],
        [2] * len(tops),
        [[top[rank][0] for top in tops] for rank in range(count)],
        [[top[rank][1] for top in tops] for rank in range(count)],
    )


@dataclass
class ScriptedEngine:
    """An `Engine`. Before token number `pause_at` it waits for `resume`; at `fail_at` it fails."""

    reply: Reply = repeat_the_prompt
    limits: EngineLimits = SMALL
    pause_at: int | None = None
    fail_at: int | None = None
    failure: LoongError = field(default_factory=lambda: ClusterError("instance 3 is lost"))
    last_reason: FinishReason = FinishReason.LENGTH  # when the reply is over
    top_logprobs: Callable[[TokenId], Sequence[tuple[TokenId, float]]] = chosen_and_others
    condition: Health = Health()  # noqa: RUF009  it is frozen
    cluster: Snapshot = AT_REST
    num_stray_frames: int = 0
    num_cached_tokens: int = 0  # of each prompt
    prefix_counts: PrefixCounts | None = None
    largest_prefixes: tuple[CachedPrefix, ...] = ()
    num_resets: int = 0  # of the prefix cache
    max_instances: int = 4
    asked: list[int] = field(default_factory=list)  # by `scale`
    past: ClusterHistory = ClusterHistory()  # noqa: RUF009  it is frozen
    resume: asyncio.Event = field(default_factory=asyncio.Event)
    paused: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)  # some request ended or was aborted
    requests: list[NewRequest] = field(default_factory=list)
    num_produced: dict[str, int] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)
    abort_reasons: dict[str, FinishReason] = field(default_factory=dict)
    _running: dict[str, tuple[dict[str, NewRequest], asyncio.Task[None]]] = field(default_factory=dict)

    def submit(self, request: NewRequest, put: PutToken) -> None:
        self.requests.append(request)
        open_choices = {choice.request_id: choice for choice in request.choices()}
        if request.num_prompt_logprobs is not None and len(request.prompt_token_ids) > 1:
            put(prompt_logprobs(request))
        if self.num_cached_tokens:
            put(CachedTokens(request.request_id, self.num_cached_tokens))
        self.num_produced.update(dict.fromkeys(open_choices, 0))
        replies = {choice.request_id: self.reply(choice) for choice in open_choices.values()}
        task = asyncio.create_task(self._produce(open_choices, replies, put))
        self._running.update(dict.fromkeys(open_choices, (open_choices, task)))

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        self.aborted.add(request_id)
        self.abort_reasons[request_id] = reason
        open_choices, task = self._running[request_id]
        open_choices.pop(request_id, None)
        if not open_choices:
            task.cancel()

    async def _produce(
        self, open_choices: dict[str, NewRequest], replies: Mapping[str, Sequence[TokenId]], put: PutToken
    ) -> None:
        try:
            for number in itertools.count():
                if number == self.pause_at:
                    self.paused.set()
                    await self.resume.wait()
                if number == self.fail_at:
                    put(self.failure)
                    return
                for request_id, choice in list(open_choices.items()):
                    token = self._token(choice, replies[request_id], number)
                    if token.finish_reason is not None:
                        del open_choices[request_id]
                    put(token)
                if not open_choices:
                    return
                await asyncio.sleep(0)
        finally:
            self.closed.set()

    def _token(self, choice: NewRequest, token_ids: Sequence[TokenId], number: int) -> ProducedToken:
        token_id = token_ids[number]
        self.num_produced[choice.request_id] += 1
        reason = choice.sampling_params.finish_reason(number + 1, token_id)
        if reason is None and number + 1 == len(token_ids):
            reason = self.last_reason
        return ProducedToken(choice.request_id, token_id, reason, self._logprobs(choice, token_id))

    def _logprobs(self, request: NewRequest, token_id: TokenId) -> Logprobs | None:
        num_logprobs = request.sampling_params.num_logprobs
        if num_logprobs is None:
            return None
        return Logprobs(-0.5, tuple(self.top_logprobs(token_id)[:num_logprobs]))

    def health(self) -> Health:
        return self.condition

    def snapshot(self) -> Snapshot:
        return self.cluster

    def size(self) -> ClusterSize:
        num_instances = self.asked[-1] if self.asked else len(self.cluster.pools)
        pools = self.cluster.pools
        wanted = frozenset(range(num_instances))
        return size_of(self.cluster, wanted | pools.keys(), 4096, num_instances, self.max_instances)

    def scale(self, num_instances: int, num_memory: int | None = None) -> None:
        if num_instances > self.max_instances:
            raise InvalidRequestError(f"at most {self.max_instances}", param="num_instances")
        if num_instances == 1:
            raise RequestTooLargeError("request long may need KV for 5000 tokens, but can have that of 4096")
        self.asked.append(num_instances)

    async def wait_for_size(self) -> None:
        self.paused.set()
        await self.resume.wait()

    def reset_prefix_cache(self) -> None:
        self.num_resets += 1

    def history(self) -> ClusterHistory:
        return self.past
