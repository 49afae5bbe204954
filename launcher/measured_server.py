"""Measurements of one server: warm it, probe it, load it, and ask it what it did."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, islice
from math import inf

from tqdm import tqdm

from loong.core.errors import ConfigError
from loong.core.timeline import ClusterHistory
from loong.launcher.bench_config import BenchConfig, LoadConfig
from loong.workloads.backends import Backend
from loong.workloads.client import Target, run_load
from loong.workloads.counters import ServerCounters
from loong.workloads.errors import ServerUnusableError
from loong.workloads.metrics import is_attained
from loong.workloads.prefill import PrefillFit, fit_prefill, probe_lengths
from loong.workloads.record import CUT_OFF, RequestRecord
from loong.workloads.request import RequestShape, TokenRun, WorkloadRequest
from loong.workloads.scrape import Scraper, ServedModel
from loong.workloads.slo import LimitsOf
from loong.workloads.workload import endless_workload

PROBES_PER_LENGTH = 2
# Workloads have seeds below 2^63. These are added to theirs, so that no prompt is in a server's cache yet,
# neither from warming up nor from the runs before.
FIRST_PROBE_SEED = 2**63
FIRST_WARM_UP_SEED = 2**64
FIRST_RUN_SEED = 2**65


@dataclass(frozen=True, slots=True)
class PrefillProbe:
    """Unloaded prefills as measured, and the formula through them."""

    num_prompt_tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    fit: PrefillFit


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one run gave. `history` is None if the server keeps none."""

    records: list[RequestRecord]
    counters: ServerCounters
    history: ClusterHistory | None

    @property
    def is_cut_off(self) -> bool:
        """Whether it was ended once it was sure to miss."""
        return any(record.error == CUT_OFF for record in self.records)


class MeasuredServer:
    """A server that is measured; `warm_up` comes first, and each run has prompts of its own."""

    def __init__(
        self, base_url: str, model: str | None, config: BenchConfig, backend: Backend = Backend.OPENAI
    ) -> None:
        self._scraper = Scraper(base_url, config.api_key)
        self._base_url, self._model, self._config, self._backend = base_url, model, config, backend
        self._served = ServedModel(model or "")
        self._run_seeds = count(FIRST_RUN_SEED, FIRST_RUN_SEED)

    async def warm_up(self, requests: Sequence[WorkloadRequest]) -> None:
        """Send a few requests like those that will be measured.

        Raises:
            ServerUnusableError: the server cannot be reached or fails.
            ConfigError: its model is too short for the workload.
        """
        if self._backend is Backend.OPENAI:
            self._served = await self._scraper.served_model(self._model)
        self._check_lengths(requests)
        load = self._config.load
        if load.num_warmups:
            shapes = _like(load, load.num_warmups)
            warm_ups = [WorkloadRequest(0.0, shape.reseeded(FIRST_WARM_UP_SEED)) for shape in shapes]
            records = await run_load(self._target, warm_ups, max_concurrency=load.max_concurrency)
            _check_all_completed("warm-up", records)

    async def probe(self, requests: Sequence[WorkloadRequest]) -> PrefillProbe:
        """Send prompts of a few lengths one after the other; of each length the fastest counts."""
        sent = [request.num_prompt_tokens for request in requests]
        lengths = probe_lengths(min(sent), max(sent))
        probes = [
            WorkloadRequest(0.0, RequestShape((TokenRun(FIRST_PROBE_SEED + index, length),), 1))
            for index, length in enumerate(lengths * PROBES_PER_LENGTH)
        ]
        records = await run_load(self._target, probes, max_concurrency=1)
        _check_all_completed("probe", records)
        seconds = [
            min(r.ttft for r in records if r.request.num_prompt_tokens == length) for length in lengths
        ]
        return PrefillProbe(tuple(lengths), tuple(seconds), fit_prefill(lengths, seconds))

    async def run(
        self, requests: Sequence[WorkloadRequest], limits_of: LimitsOf, max_misses: float = inf
    ) -> Measurement:
        """Send the requests, until the end or until more than `max_misses` have missed; return what happened.

        Raises:
            ServerUnusableError: the server cannot be reached before that.
            ConfigError: its model is too short for the workload.
        """
        self._check_lengths(requests)
        offset = next(self._run_seeds)
        fresh = [WorkloadRequest(r.arrival_time, r.shape.reseeded(offset)) for r in requests]
        counters_before = await self._scraper.counters()
        history_before = await self._scraper.history()
        records = await self._load(fresh, limits_of, max_misses)
        counters, history = ServerCounters(), None
        with contextlib.suppress(ServerUnusableError):  # it died under load: the records tell
            counters = (await self._scraper.counters()).since(counters_before)
            history = await self._scraper.history()
        if history is not None and history_before is not None:
            history = history.after(history_before.end)
        return Measurement(records, counters, history)

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

    async def _load(
        self, requests: Sequence[WorkloadRequest], limits_of: LimitsOf, max_misses: float
    ) -> list[RequestRecord]:
        """Run the load under a progress bar on stderr that shows the attainment so far."""
        num_attained, num_missed = 0, 0
        with tqdm(total=len(requests), unit="req", disable=None, leave=self._config.is_single) as bar:

            def show(record: RequestRecord) -> None:
                nonlocal num_attained, num_missed
                if is_attained(record, limits_of):
                    num_attained += 1
                else:
                    num_missed += 1
                share = num_attained / (num_attained + num_missed)
                bar.set_postfix_str(f"attained {share:.0%}", refresh=False)
                bar.update()

            return await run_load(
                self._target,
                requests,
                max_concurrency=self._config.load.max_concurrency,
                on_record=show,
                is_hopeless=lambda: num_missed > max_misses,
            )

    def _check_lengths(self, requests: Sequence[WorkloadRequest]) -> None:
        max_model_len = self._served.max_model_len
        longest = max(request.num_prompt_tokens + request.num_output_tokens for request in requests)
        if max_model_len is None or longest <= max_model_len:
            return
        divisor = 2
        while longest / divisor > max_model_len:
            divisor *= 2
        raise ConfigError(
            f"the longest request has {longest:,} tokens and the model takes {max_model_len:,}; make "
            f"--length-scale at least {divisor} times smaller, or serve with a greater --max-model-len"
        )


def _like(load: LoadConfig, number: int) -> list[RequestShape]:
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


def _check_all_completed(what: str, records: Sequence[RequestRecord]) -> None:
    for record in records:
        if record.error is not None:
            raise ServerUnusableError(
                f"a {what} request of {record.request.num_prompt_tokens:,} tokens failed: {record.error}"
            )
