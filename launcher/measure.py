"""One measurement of one server: warm it, probe it, load it, and ask it what it did."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf

from tqdm import tqdm

from loong.core.errors import ConfigError
from loong.core.timeline import ClusterHistory
from loong.launcher.bench_config import BenchConfig, LoadConfig
from loong.workloads.client import Target, run_load
from loong.workloads.counters import ServerCounters
from loong.workloads.errors import ServerUnusableError
from loong.workloads.metrics import is_attained
from loong.workloads.prefill import PrefillFit, fit_prefill, probe_lengths
from loong.workloads.record import RequestRecord
from loong.workloads.request import RequestShape, TokenRun, WorkloadRequest
from loong.workloads.scrape import Scraper
from loong.workloads.slo import LimitsOf
from loong.workloads.workload import endless_workload

PROBES_PER_LENGTH = 2
FIRST_PROBE_SEED = 2**63  # workloads have theirs below, so no probe's prompt is cached
FIRST_WARM_UP_SEED = 2**64  # added to a workload's, so that no measured prompt is cached either


@dataclass(frozen=True, slots=True)
class PrefillProbe:
    """Unloaded prefills as measured, and the formula through them."""

    num_prompt_tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    fit: PrefillFit


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one run gave. `history` is None if the server keeps none, `probe` if the SLO needs none."""

    records: list[RequestRecord]
    counters: ServerCounters
    history: ClusterHistory | None
    probe: PrefillProbe | None

    def limits_of(self, config: BenchConfig) -> LimitsOf:
        """Return the bounds of a prompt of a length."""
        return _limits_of(config, self.probe)


async def measure(
    base_url: str,
    model: str | None,
    config: BenchConfig,
    requests: Sequence[WorkloadRequest],
    probe: PrefillProbe | None,
) -> Measurement:
    """Warm the server up, send the requests, and return what happened.

    A `probe` of an earlier run is used again, so that every policy is held to the same bounds.

    Raises:
        ServerUnusableError: the server cannot be reached or fails the warm-up.
        ConfigError: its model is too short for the workload.
    """
    scraper = Scraper(base_url, config.api_key)
    served = await scraper.served_model(model)
    _check_lengths(requests, served.max_model_len)
    target = Target(base_url, served.id, config.load.vocab_size, config.load.request_timeout, config.api_key)
    await _warm_up(target, config.load)
    if probe is None and config.slo.needs_prefill_time:
        probe = await _probe(target, requests)
    counters_before = await scraper.counters()
    history_before = await scraper.history()
    records = await _load(target, config, requests, _limits_of(config, probe))
    counters, history = ServerCounters(), None
    with contextlib.suppress(ServerUnusableError):  # it died under load: the records tell
        counters = (await scraper.counters()).since(counters_before)
        history = await scraper.history()
    if history is not None and history_before is not None:
        history = history.after(history_before.end)
    return Measurement(records, counters, history, probe)


def _limits_of(config: BenchConfig, probe: PrefillProbe | None) -> LimitsOf:
    return config.slo.limits_of(None if probe is None else probe.fit)


def _check_lengths(requests: Sequence[WorkloadRequest], max_model_len: int | None) -> None:
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


async def _warm_up(target: Target, load: LoadConfig) -> None:
    if load.num_warmups == 0:
        return
    drawn = endless_workload(
        load.workload, seed=load.seed + 1, request_rate=inf, burstiness=1.0, length_scale=load.length_scale
    )
    requests = [
        WorkloadRequest(0.0, request.shape.reseeded(FIRST_WARM_UP_SEED))
        for request in islice(drawn, load.num_warmups)
    ]
    _check_all_completed("warm-up", await run_load(target, requests, max_concurrency=load.max_concurrency))


async def _probe(target: Target, requests: Sequence[WorkloadRequest]) -> PrefillProbe:
    """Send prompts of a few lengths one after the other; of each length the fastest counts."""
    sent = [request.num_prompt_tokens for request in requests]
    lengths = probe_lengths(min(sent), max(sent))
    probes = [
        WorkloadRequest(0.0, RequestShape((TokenRun(FIRST_PROBE_SEED + index, length),), 1))
        for index, length in enumerate(lengths * PROBES_PER_LENGTH)
    ]
    records = await run_load(target, probes, max_concurrency=1)
    _check_all_completed("probe", records)
    seconds = [min(r.ttft for r in records if r.request.num_prompt_tokens == length) for length in lengths]
    return PrefillProbe(tuple(lengths), tuple(seconds), fit_prefill(lengths, seconds))


async def _load(
    target: Target, config: BenchConfig, requests: Sequence[WorkloadRequest], limits_of: LimitsOf
) -> list[RequestRecord]:
    """Run the load under a progress bar on stderr that shows the attainment so far."""
    verdicts: list[bool] = []
    with tqdm(total=len(requests), unit="req", disable=None) as bar:

        def show(record: RequestRecord) -> None:
            verdicts.append(is_attained(record, limits_of))
            bar.set_postfix_str(f"attained {sum(verdicts) / len(verdicts):.0%}", refresh=False)
            bar.update()

        return await run_load(target, requests, max_concurrency=config.load.max_concurrency, on_record=show)


def _check_all_completed(what: str, records: Sequence[RequestRecord]) -> None:
    for record in records:
        if record.error is not None:
            raise ServerUnusableError(
                f"a {what} request of {record.request.num_prompt_tokens:,} tokens failed: {record.error}"
            )
