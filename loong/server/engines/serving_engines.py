"""The engines that serve, with the work that each has and the prefixes that it most likely has cached."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from loong.core.request import NewRequest, RequestId
from loong.engine.client import EngineClient, EngineLimits
from loong.server.engines.open_request import OpenRequest
from loong.server.engines.routing import (
    EngineLoad,
    RememberedPrefixes,
    blocks_of,
    chosen_engine,
    output_work,
)


@dataclass(slots=True, eq=False)
class _Engine:
    client: EngineClient
    prefixes: RememberedPrefixes
    num_outstanding: int = 0


class ServingEngines:
    """Engines by number. Of each, `max_remembered` tokens of prefixes are remembered (0: none are cached)."""

    def __init__(self, limits: EngineLimits, max_remembered: int) -> None:
        self._limits, self._max_remembered = limits, max_remembered
        self._engines: dict[int, _Engine] = {}

    def __bool__(self) -> bool:
        return bool(self._engines)

    @property
    def limits(self) -> EngineLimits:
        """The bounds of a request: those of the engine with the most room, or the last known ones."""
        most = max((engine.client.limits.max_request_kv for engine in self._engines.values()), default=None)
        if most is not None and most != self._limits.max_request_kv:
            self._limits = replace(self._limits, max_request_kv=most)
        return self._limits

    def outstanding(self) -> dict[int, int]:
        """Return the work of each engine's open requests, in tokens."""
        return {engine_id: engine.num_outstanding for engine_id, engine in sorted(self._engines.items())}

    def add(self, engine_id: int, client: EngineClient) -> None:
        """Add an engine, which has nothing cached."""
        self._engines[engine_id] = _Engine(client, RememberedPrefixes(self._max_remembered))

    def remove(self, engine_id: int) -> bool:
        """Remove an engine. Return whether it was there."""
        return self._engines.pop(engine_id, None) is not None

    def client_of(self, opened: OpenRequest) -> EngineClient | None:
        """Return the engine that has a request, or None."""
        engine = self._engine_of(opened)
        return None if engine is None else engine.client

    def forget_prefixes(self) -> None:
        """Forget what engines have cached."""
        for engine in self._engines.values():
            engine.prefixes.forget()

    def blocks_of(self, request: NewRequest) -> list[int]:
        """Return the blocks of a prompt that a cache may have."""
        return blocks_of(request.cache_salt, request.prompt_token_ids) if self._is_cached(request) else []

    def place(self, opened: OpenRequest) -> EngineLoad:
        """Count a request at the engine with the least work before it, and return the load that decided."""
        request, num_known = opened.request, opened.num_known_tokens
        params, num_choices = request.sampling_params, request.num_choices
        num_final = len(request.prompt_token_ids) + num_choices * (params.max_tokens - 1)
        chosen = chosen_engine(tuple(self._loads(opened)), num_known, num_final)
        opened.engine_id, opened.work = chosen.engine_id, 0
        opened.is_prompt_counted = True
        self.count(opened, num_known - chosen.num_cached + output_work(params.max_tokens, num_choices))
        self._engines[chosen.engine_id].prefixes.remember(opened.blocks)
        return chosen

    def count_first_token(self, opened: OpenRequest) -> None:
        """Count no more work for the prompt of a request, since its engine has computed it."""
        opened.is_prompt_counted = False
        params = opened.request.sampling_params
        self.count(opened, output_work(params.max_tokens, opened.request.num_choices))

    def count(self, opened: OpenRequest, work: int) -> None:
        """Change the work that a request counts as."""
        if (engine := self._engine_of(opened)) is not None:
            engine.num_outstanding += work - opened.work
        opened.work = work

    def remember(self, opened: OpenRequest, choice_id: RequestId) -> None:
        """Remember a prompt with the output of a choice."""
        engine, request = self._engine_of(opened), opened.request
        if engine is not None and self._is_cached(request):
            known = (*request.prompt_token_ids, *opened.outputs[choice_id])
            engine.prefixes.remember(blocks_of(request.cache_salt, known, opened.blocks))

    def _loads(self, opened: OpenRequest) -> Iterator[EngineLoad]:
        is_scored = opened.request.num_prompt_logprobs is not None  # all of its prompt is computed
        for engine_id, engine in self._engines.items():
            prefixes = engine.prefixes
            num_cached = 0 if is_scored else prefixes.num_cached(opened.blocks)
            yield EngineLoad(
                engine_id,
                engine.num_outstanding,
                min(num_cached, opened.num_known_tokens - 1),
                prefixes.num_tokens,
                engine.client.limits.max_request_kv,
            )

    def _engine_of(self, opened: OpenRequest) -> _Engine | None:
        return None if opened.engine_id is None else self._engines.get(opened.engine_id)

    def _is_cached(self, request: NewRequest) -> bool:
        return request.uses_cache and self._max_remembered > 0
