"""A run under faults: the undisturbed outputs first, then the same prompts while faults are injected."""

import asyncio
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from time import perf_counter

import numpy as np

from loong.core.request import TokenId
from loong.engine.faults import FaultKind
from loong.launcher.chaos.config import ChaosConfig
from loong.launcher.chaos.prompts import Prompt, drawn_prompts
from loong.launcher.chaos.report import Fault, Report, judged, with_recovery
from loong.launcher.chaos.server import FaultClient, FaultRefusedError, ServerTotals
from loong.launcher.chaos.streams import Ending, StreamClient, StreamRecord
from loong.workloads.client.connections import ConnectionPool
from loong.workloads.client.scrape import Scraper
from loong.workloads.errors import ServerUnusableError
from loong.workloads.request import SMALLEST_VOCABULARY

NUM_AT_ONCE = 4  # undisturbed streams
MAX_WAIT_SECONDS = 60.0  # for lost instances to join again at the end
LOOK_SECONDS = 0.2
_VERBS = {
    FaultKind.KILL: "kill",
    FaultKind.KILL_ENGINE: "kill",
    FaultKind.KILL_MANAGER: "kill",
    FaultKind.PAUSE: "pause",
}
CLOSING_SECONDS = 0.5  # until a server has seen that a connection is closed


async def run_chaos(config: ChaosConfig) -> Report:
    """Return the report of a run, or of its part until it is interrupted.

    Raises `ServerUnusableError` if the server does not answer, injects no faults, or fails without them.
    """
    model = await Scraper(config.base_url, config.api_key).served_model(config.model)
    most = model.max_model_len or config.longest_prompt + config.longest_output
    longest_output = min(config.longest_output, most // 2)
    longest_prompt = min(config.longest_prompt, most - longest_output)
    prompts = drawn_prompts(
        config.num_prompts, longest_prompt, longest_output, SMALLEST_VOCABULARY, config.seed
    )
    headers = {} if config.api_key is None else {"Authorization": f"Bearer {config.api_key}"}
    pool = ConnectionPool(config.base_url, headers)
    started = perf_counter()
    client = StreamClient(pool, model.id, config.request_timeout, lambda: perf_counter() - started)
    try:
        server = FaultClient(config.base_url, config.admin_key or config.api_key)
        await server.check_faults()
        _say(f"recording {len(prompts)} undisturbed outputs of {model.id} at {config.base_url}")
        first = await server.totals()
        expected = await _undisturbed(client, prompts)
        before = await _totals_at_rest(pool, server)
        if before.num_losses != first.num_losses:
            raise ServerUnusableError("an instance was lost before any fault was injected")
        run = _Run(config, server, client, prompts, expected)
        await run.go_on()
        after = await _totals_at_rest(pool, server)
        return run.report(before, after, await server.health())
    finally:
        pool.close()


async def _totals_at_rest(pool: ConnectionPool, server: FaultClient) -> ServerTotals:
    """Return the server's counts without our idle connections, which it would count as descriptors."""
    pool.close()
    await asyncio.sleep(CLOSING_SECONDS)
    return await server.totals()


async def _undisturbed(client: StreamClient, prompts: Sequence[Prompt]) -> list[list[TokenId]]:
    slots = asyncio.Semaphore(NUM_AT_ONCE)

    async def output(index: int, prompt: Prompt) -> list[TokenId]:
        record = StreamRecord(index, 0.0)
        async with slots:
            await client.follow(prompt, record)
        if record.ending is not Ending.COMPLETE or len(record.token_ids) != prompt.num_output_tokens:
            what = record.reason or f"it has {len(record.token_ids)} of {prompt.num_output_tokens} tokens"
            raise ServerUnusableError(f"an undisturbed output cannot be used: {what}")
        return record.token_ids

    return list(await asyncio.gather(*(output(i, prompt) for i, prompt in enumerate(prompts))))


class _Run:
    """Requests in an open loop, and faults, until the duration is over or the run is interrupted."""

    def __init__(
        self,
        config: ChaosConfig,
        server: FaultClient,
        client: StreamClient,
        prompts: Sequence[Prompt],
        expected: Sequence[Sequence[TokenId]],
    ) -> None:
        self._config, self._server, self._client = config, server, client
        self._prompts, self._expected = prompts, expected
        self._records: list[StreamRecord] = []
        self._streams: set[asyncio.Task[None]] = set()
        self._faults: list[Fault] = []
        self._skipped: Counter[str] = Counter()
        self._is_interrupted = False

    async def go_on(self) -> None:
        """Send and inject until the end, or until an interrupt, which cuts open streams off."""
        _say(f"sending them at {self._config.request_rate:g}/s for {self._config.duration:g} s, with faults")
        async with _interruptible() as interrupted:
            work = asyncio.create_task(self._work())
            stop = asyncio.create_task(interrupted.wait())
            await asyncio.wait([work, stop], return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
            self._is_interrupted = not work.done()
            work.cancel()
            for stream in self._streams:
                stream.cancel()
            await asyncio.gather(work, *self._streams, return_exceptions=True)
        if not work.cancelled() and (error := work.exception()) is not None:
            raise error

    def report(self, before: ServerTotals, after: ServerTotals, health: str) -> Report:
        """Return the report of what was sent and injected."""
        found, endings = judged(self._expected, self._records)
        return Report(
            num_sent=len(self._records),
            endings=endings,
            failures=Counter(r.reason for r in self._records if r.ending is Ending.FAILED),
            losses=Counter(r.reason for r in self._records if r.ending is Ending.LOST),
            num_tokens=sum(len(record.token_ids) for record in self._records),
            differences=found,
            faults=[with_recovery(fault, self._records) for fault in self._faults],
            skipped=self._skipped,
            before=before,
            after=after,
            health=health,
            is_interrupted=self._is_interrupted,
        )

    async def _work(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._send())
            for kind in self._config.intervals:
                group.create_task(self._inject(kind))
        _say(f"waiting for {len(self._streams)} open streams")
        if self._streams:
            await asyncio.wait(self._streams)
        await asyncio.sleep(self._end_of_pauses() - self._now())  # a worker may be given up until then
        for _ in range(round(MAX_WAIT_SECONDS / LOOK_SECONDS)):
            if await self._server.health() == "ok":
                return
            await asyncio.sleep(LOOK_SECONDS)

    async def _send(self) -> None:
        """Send the prompts again and again, in an order and with gaps that the seed decides."""
        generator = np.random.default_rng(self._config.seed)
        end = self._now() + self._config.duration
        due = self._now()
        while (due := due + generator.exponential(1 / self._config.request_rate)) < end:
            await asyncio.sleep(max(0.0, due - self._now()))
            index = int(generator.integers(len(self._prompts)))
            record = StreamRecord(index, self._now())
            self._records.append(record)
            stream = asyncio.create_task(self._client.follow(self._prompts[index], record))
            self._streams.add(stream)
            stream.add_done_callback(self._streams.discard)

    async def _inject(self, kind: FaultKind) -> None:
        """Inject one fault in each interval, at a time in it that the seed decides."""
        generator = np.random.default_rng([self._config.seed, len(kind.value)])
        interval, start = self._config.intervals[kind], self._now()
        for number in range(max(1, int(self._config.duration / interval))):
            due = start + min((number + generator.random()) * interval, self._config.duration)
            await asyncio.sleep(max(0.0, due - self._now()))
            at = self._now()
            try:
                hit = await self._server.inject(kind, self._config.pause_time)
            except (FaultRefusedError, ServerUnusableError) as error:  # it may answer the next
                self._skipped[str(error)] += 1
                continue
            self._faults.append(Fault(kind, hit.instance, at, engine_id=hit.engine))
            _say(f"{at - start:.1f} s: {_VERBS[kind]} of {hit}")

    def _end_of_pauses(self) -> float:
        pauses = (fault.injected_at for fault in self._faults if fault.kind is FaultKind.PAUSE)
        return max(pauses, default=-self._config.pause_time) + self._config.pause_time

    def _now(self) -> float:
        return self._client.now()


@asynccontextmanager
async def _interruptible() -> AsyncIterator[asyncio.Event]:
    """Yield an event that the first SIGINT sets; the second one ends the process as usual."""
    loop, interrupted = asyncio.get_running_loop(), asyncio.Event()

    def interrupt() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        interrupted.set()

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        yield interrupted
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _say(text: str) -> None:
    print(text, file=sys.stderr)
