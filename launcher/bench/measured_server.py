"""Measurements of one server: warm-up, prefill probe, load, and the server's own counters and history."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from math import inf
from secrets import randbits

from loong.core.cluster_history import ClusterHistory
from loong.launcher.bench.config import BenchConfig, BenchLoadConfig, check_lengths
from loong.launcher.bench.progress import RunProgress, run_bar, short_bar
from loong.workloads.client.backends import ServerApi
from loong.workloads.client.client import Target, run_load
from loong.workloads.client.scrape import Scraper, ServedModel
from loong.workloads.distributions.prefill import PrefillFit, fit_prefill, probe_lengths
from loong.workloads.errors import ServerUnusableError
from loong.workloads.metrics.counters import ServerCounters
from loong.workloads.metrics.record import CUT_OFF, RequestRecord
from loong.workloads.request import RequestShape, TokenRun, WorkloadRequest
from loong.workloads.workload import endless_workload

PROBES_PER_LENGTH = 2
# Workloads have seeds below 2^63. These are added to theirs, with a number of this call, so that no prompt is
# in a server's cache yet: not from warming up, from the runs before, or from other calls.
FIRST_PROBE_SEED = 2**63
FIRST_WARM_UP_SEED = 2**64
FIRST_RUN_SEED = 2**65
FIRST_CALL_SEED = 2**96


@dataclass(frozen=True, slots=True)
class PrefillProbe:
    """Unloaded prefills as measured, and the formula through them."""

    num_prompt_tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    fit: PrefillFit


@dataclass(frozen=True, slots=True)
class Measurement:
    """The result of one run. `history` is None if the server keeps none."""

    records: list[RequestRecord]
    counters: ServerCounters
    history: ClusterHistory | None

    @property
    def is_cut_off(self) -> bool:
        """Return whether the run was stopped once it was sure to miss."""
        return any(record.error == CUT_OFF for record in self.records)


class MeasuredServer:
    """A server that is measured; `warm_up` comes first, and each run has prompts of its own."""

    def __init__(
        self, base_url: str, model: str | None, config: BenchConfig, backend: ServerApi = ServerApi.OPENAI
    ) -> None:
        self._scraper = Scraper(base_url, config.api_key)
        self._base_url, self._model, self._config, self._backend = base_url, model, config, backend
        self._served = ServedModel(model or "")
        self._call_seed = FIRST_CALL_SEED * randbits(64)
        self._run_seeds = count(self._call_seed + FIRST_RUN_SEED, FIRST_RUN_SEED)

    async def find_model(self) -> ServedModel:
        """Return the model that will be asked. Raises `ServerUnusableError` if it is not served to us."""
        if self._backend is ServerApi.OPENAI:
            self._served = await self._scraper.served_model(self._model)
        return self._served

    async def warm_up(self) -> None:
        """Send a few requests like those that will be measured.

        Raises:
            ServerUnusableError: the server cannot be reached or fails.
        """
        await self.find_model()
        load = self._config.load
        if load.num_warmups:
            shapes = _like(load, load.num_warmups)
            offset = self._call_seed + FIRST_WARM_UP_SEED
            warm_ups = [WorkloadRequest(0.0, shape.alone().reseeded(offset)) for shape in shapes]
            await self._send("warm-up", warm_ups, load.max_concurrency)

    async def capacity(self, shapes: Sequence[RequestShape]) -> float:
        """Return the requests per second at which `shapes` are completed that are sent at once.

        Raises:
            ServerUnusableError: the server cannot be reached or fails.
        """
        await self.find_model()
        offset = next(self._run_seeds)
        sent = [WorkloadRequest(0.0, shape.alone().reseeded(offset)) for shape in shapes]
        records = await self._send("capacity", sent, self._config.load.max_concurrency)
        return len(records) / max(record.finish_time for record in records)

    async def probe(self, requests: Sequence[WorkloadRequest]) -> PrefillProbe:
        """Send prompts of a few lengths one after the other; of each length the fastest counts.

        Raises:
            ServerUnusableError: the server cannot be reached or fails.
        """
        sent = [request.num_prompt_tokens for request in requests]
        lengths = probe_lengths(min(sent), max(sent))
        first = self._call_seed + FIRST_PROBE_SEED
        probes = [
            WorkloadRequest(0.0, RequestShape((TokenRun(first + index, length),), 1))
            for index, length in enumerate(lengths * PROBES_PER_LENGTH)
        ]
        records = await self._send("probe", probes, max_concurrency=1)
        seconds = [
            min(r.ttft for r in records if r.request.num_prompt_tokens == length) for length in lengths
        ]
        return PrefillProbe(tuple(lengths), tuple(seconds), fit_prefill(lengths, seconds))

    async def run(self, requests: Sequence[WorkloadRequest], progress: RunProgress) -> Measurement:
        """Send the requests, until the end or until more have missed than may; return what happened.

        `progress` has the requests that have ended at any time, also if the run is interrupted.

        Raises:
            ServerUnusableError: the server cannot be reached before that.
        """
        check_lengths(requests, self._served.max_model_len)
        offset = next(self._run_seeds)
        fresh = [replace(request, shape=request.shape.reseeded(offset)) for request in requests]
        counters_before = await self._scraper.counters()
        history_before = await self._scraper.history()
        async with run_bar(progress, len(fresh), is_kept=self._config.is_single) as take:
            records = await run_load(
                self._target,
                fresh,
                max_concurrency=self._config.load.max_concurrency,
                on_record=take,
                is_hopeless=progress.is_hopeless,
                in_flight=progress.in_flight,
            )
        counters, history = ServerCounters(), None
        with contextlib.suppress(ServerUnusableError):  # it died under load: the records show it
            counters = (await self._scraper.counters()).since(counters_before)
            history = await self._scraper.history()
        if history is not None and history_before is not None:
            history = history.after(history_before.end)
        return Measurement(records, counters, history)

    async def _send(
        self, what: str, requests: Sequence[WorkloadRequest], max_concurrency: int | None
    ) -> list[RequestRecord]:
        """Send requests that are not measured, under a progress bar, and check that all are answered."""
        with short_bar(what, len(requests)) as count_one:
            records = await run_load(
                self._target, requests, max_concurrency=max_concurrency, on_record=count_one
            )
        for record in records:
            if record.error is not None:
                raise ServerUnusableError(
                    f"a {what} request of {record.request.num_prompt_tokens:,} tokens failed: {record.error}"
                )
        return records

    @property
    def _target(self) -> Target:
        load = self._config.load
        return Target(
            self._base_url,
            self._served.id,
            load.vocab_size,
            load.request_timeout,
            self._config.api_key,
            self._backend,
            load.extra_body,
        )


def _like(load: BenchLoadConfig, number: int) -> list[RequestShape]:
    """Draw other requests of the workload."""
    drawn = endless_workload(
        load.workload,
        seed=load.seed + 1,
        request_rate=inf,
        burstiness=1.0,
        length_scale=load.length_scale,
        output_scale=load.output_scale,
    )
    return [request.shape for request in islice(drawn, number)]
