"""An engine without a model, for tests of what stands before an engine: it says what the test told it to."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TypeAlias

from loong.core.errors import ClusterError
from loong.core.events import Logprobs, ProducedToken
from loong.core.instance import ElasticInstance, InstanceKind
from loong.core.request import FinishReason, Request, TokenId
from loong.core.snapshot import Snapshot
from loong.core.timeline import ClusterHistory
from loong.server.engine_client import EngineLimits, Health

SMALL = EngineLimits(max_model_len=2048, max_request_kv=4096, vocab_size=264)
AT_REST = Snapshot(0.0, (ElasticInstance(0, 1, InstanceKind.FULL, 4096),))

Reply: TypeAlias = Callable[[Request], Sequence[TokenId]]
Serving: TypeAlias = Callable[..., AbstractAsyncContextManager[str]]  # (engine, **settings) -> address


def repeat_the_prompt(request: Request) -> Sequence[TokenId]:
    """The prompt, over and over."""
    prompt = request.prompt_token_ids
    return [prompt[i % len(prompt)] for i in range(request.sampling_params.max_tokens)]


def say(text: str) -> Reply:
    """A reply of the bytes of `text`, for a tokenizer whose ids are bytes."""
    return lambda request: [*text.encode()]


@dataclass
class ScriptedEngine:
    """An `EngineClient`. Before token number `pause_at` it waits for `resume`; at `fail_at` it fails."""

    reply: Reply = repeat_the_prompt
    limits: EngineLimits = SMALL
    pause_at: int | None = None
    fail_at: int | None = None
    last_reason: FinishReason = FinishReason.LENGTH  # when the reply is over
    is_alive: bool = True
    cluster: Snapshot = AT_REST
    past: ClusterHistory = ClusterHistory()  # noqa: RUF009  it is frozen
    resume: asyncio.Event = field(default_factory=asyncio.Event)
    paused: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)  # some request ended or was aborted
    requests: list[Request] = field(default_factory=list)
    num_produced: dict[str, int] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)

    async def generate(self, request: Request) -> AsyncGenerator[ProducedToken, None]:
        self.requests.append(request)
        replies = {choice.request_id: (choice, self.reply(choice)) for choice in request.choices()}
        self.num_produced.update(dict.fromkeys(replies, 0))
        try:
            for number in itertools.count():
                if number == self.pause_at:
                    self.paused.set()
                    await self.resume.wait()
                if number == self.fail_at:
                    raise ClusterError("instance 3 is lost")
                for choice, token_ids in [r for i, r in replies.items() if i not in self.aborted]:
                    token = self._token(choice, token_ids, number)
                    if token.finish_reason is not None:
                        del replies[choice.request_id]
                    yield token
                if self.aborted.issuperset(replies):
                    return
                await asyncio.sleep(0)
        finally:
            self.closed.set()

    def abort(self, request_id: str) -> None:
        self.aborted.add(request_id)

    def _token(self, choice: Request, token_ids: Sequence[TokenId], number: int) -> ProducedToken:
        token_id = token_ids[number]
        self.num_produced[choice.request_id] += 1
        reason = choice.sampling_params.finish_reason(number + 1, token_id)
        if reason is None and number + 1 == len(token_ids):
            reason = self.last_reason
        return ProducedToken(choice.request_id, token_id, reason, self._logprobs(choice, token_id))

    def _logprobs(self, request: Request, token_id: TokenId) -> Logprobs | None:
        num_logprobs = request.sampling_params.num_logprobs
        if num_logprobs is None:
            return None
        return Logprobs(-0.5, tuple((token_id ^ i, -0.5 - i) for i in range(num_logprobs)))

    def health(self) -> Health:
        return Health(self.is_alive, "ok" if self.is_alive else "no step ended for 60 s")

    def snapshot(self) -> Snapshot:
        return self.cluster

    def history(self) -> ClusterHistory:
        return self.past
