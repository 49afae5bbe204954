"""The data of a dashboard page: the recent past first, then the news of each tick."""

from bisect import bisect_right
from itertools import islice, takewhile
from math import ceil, inf

import msgspec

import loong
from loong.core.cluster_history import BatchSlice, ChangeKind, InstanceChange, KVMove
from loong.core.cost.work import Phase, phase_with
from loong.core.snapshot import RunningBatch, Snapshot
from loong.engine.health import HealthState
from loong.observability.decision_log.runs import RequestRun
from loong.server.cluster import Cluster
from loong.server.dashboard.past import Past
from loong.server.metrics.request_observers import RequestObservers
from loong.workloads.report.timeline_cells import LONG_SHARE

WINDOW_SECONDS = 120.0  # of the past, on a new page
CHANGE_SECONDS = 300.0  # in which changes of instances are sent again, which is what a page can show
MAX_BATCHES = 4_000  # in one tick
MAX_LIVE = 100  # listed requests that have not ended
LENGTH_EDGES = (128, 512, 2048, 8192, 32768, 131072)  # of buckets, in prompt tokens


class FeedBatch(msgspec.Struct, frozen=True):
    """A batch. Its end is None while it runs, and `kv` is the KV of its instances at its end.

    Holders are instances outside its group that serve it. `recomputed` are tokens that it computed again.
    """

    id: int
    instances: tuple[int, ...]
    phase: Phase
    start: float
    end: float | None
    num_requests: int
    longest_prompt: int
    kv: tuple[int, ...] = ()
    holders: tuple[int, ...] = ()
    recomputed: int = 0


class FeedChange(msgspec.Struct, frozen=True):
    """A change of an instance: lost, joined, draining or left; or it lent room, or has it again."""

    instance: int
    kind: ChangeKind
    time: float
    reason: str


class FeedLevel(msgspec.Struct, frozen=True):
    """The KV of an idle instance from a time on, which no batch shows."""

    instance: int
    time: float
    num_tokens: int


class FeedMove(msgspec.Struct, frozen=True):
    """A migration that has ended. A copy leaves its source as it is."""

    source: int
    destination: int
    num_tokens: int
    start: float
    end: float
    is_copy: bool


class FeedRun(msgspec.Struct, frozen=True):
    """A request with its targets, which are its own or the policy's. Times are seconds of the engine's clock.

    `waited` is the time from its arrival to its first batch. None means not yet.
    """

    id: str
    arrived: float
    waited: float | None
    prompt: int
    cached: int  # of the prompt
    output: int
    end: str | None
    state: str
    dops: tuple[int, ...]
    ttft: float | None
    tpot: float | None
    ttft_target: float
    tpot_target: float


class FeedPrefix(msgspec.Struct, frozen=True):
    """One of the largest parts of the prefix cache: tokens from position `start` on, by instance."""

    id: str
    start: int
    num_tokens: int
    instances: dict[int, int]
    num_readers: int


class Bucket(msgspec.Struct):
    """The requests without KV whose prompts are shorter than `below`; None: longer than all bounds."""

    below: int | None
    num_requests: int = 0
    num_tokens: int = 0
    oldest: float = 0.0


class Hello(msgspec.Struct, frozen=True):
    """The constant data of a page, and the samples of the past."""

    model: str
    policy: str
    version: str
    max_model_len: int
    num_engines: int  # of the server; each has a page
    past: list[tuple[float, ...]]  # samples of `Past`
    length_edges: tuple[int, ...] = LENGTH_EDGES


class Tick(msgspec.Struct, frozen=True):
    """The present state of the cluster, and what has ended since the last tick."""

    now: float
    health: str | None  # why it is degraded or dead; None: ok
    instances: list[tuple[int, int, int, str, int]]  # id, KV used, KV capacity, kind, KV cached
    states: dict[int, str]  # of instances that there are or are to be
    ended: list[FeedBatch]
    running: list[FeedBatch]
    moves: list[FeedMove]
    kv_levels: list[FeedLevel]
    changes: list[FeedChange]  # all recent ones, each time
    queue: list[Bucket]
    live: list[FeedRun]
    over: list[FeedRun]
    num_running: int
    num_waiting: int
    prefix_cache: tuple[int, int] | None  # prompt tokens looked up since the start, and found; None: no cache
    largest_prefixes: list[FeedPrefix]
    num_judged: int
    num_met: int
    long_prompt: int
    num_computed_tokens: int
    num_output_tokens: int
    num_batches_by_dop: dict[int, int]
    errors: dict[str, float]
    loans: list[tuple[int, int, int, float, str]]  # creditor, debtor, tokens, since, reason


class Feed:
    """The feed of one page. It remembers what the page already has."""

    def __init__(self, cluster: Cluster, request_observers: RequestObservers, past: Past) -> None:
        self._cluster, self._request_observers, self._past = cluster, request_observers, past
        batches = self._cluster.engine.history().batches
        self._longest_prompt = max((batch.longest_prompt for batch in batches), default=0)
        self._sent_to = self._cluster.engine.snapshot().now - WINDOW_SECONDS
        self._reported_run_at = -inf

    def hello(self) -> Hello:
        """Return the first message."""
        return Hello(
            model=self._cluster.settings.served_model_name,
            policy=self._request_observers.policy,
            version=loong.__version__,
            max_model_len=self._cluster.engine.limits.max_model_len,
            num_engines=self._cluster.settings.num_engines,
            past=self._past.samples(),
        )

    def tick(self) -> Tick:
        """Return the present state and the news since the last tick."""
        engine, request_observers = self._cluster.engine, self._request_observers
        snapshot, history, health = engine.snapshot(), engine.history(), engine.health()
        counts, sent_to, self._sent_to = engine.prefix_counts, self._sent_to, snapshot.now
        batches = takewhile(lambda batch: batch.ended_at > sent_to, reversed(history.batches))
        moves = takewhile(lambda move: move.ended_at > sent_to, reversed(history.moves))
        levels = takewhile(lambda level: level.time > sent_to, reversed(history.kv_levels))
        ended = [_ended(batch) for batch in islice(batches, MAX_BATCHES)]
        begun = (batch for batch in (*snapshot.ending, *snapshot.batches) if batch.has_started)
        running = [_running(batch, snapshot) for batch in begun]
        longest = (batch.longest_prompt for batch in (*ended, *running))
        self._longest_prompt = max(self._longest_prompt, *longest, 0)
        return Tick(
            now=snapshot.now,
            health=None if health.state is HealthState.OK else health.message,
            instances=[
                (i.instance_id, i.kv_used, i.kv_capacity, i.kind.value, i.kv_cached)
                for i in snapshot.instances
            ],
            states={i.instance_id: i.state.value for i in engine.size().instances},
            ended=ended,
            running=running,
            moves=[_move(move) for move in moves if move.is_committed],
            kv_levels=[FeedLevel(level.instance_id, level.time, level.num_tokens) for level in levels],
            changes=[_change(c) for c in history.changes if c.time > snapshot.now - CHANGE_SECONDS],
            queue=_buckets(snapshot),
            live=[self._run(run, snapshot) for run in islice(request_observers.runs.live, MAX_LIVE)],
            over=[self._run(run, snapshot) for run in self._new_runs()],
            num_running=len(snapshot.running),
            num_waiting=len(snapshot.waiting) + len(snapshot.following),
            prefix_cache=None if counts is None else (counts.num_asked, counts.num_hits),
            largest_prefixes=[
                FeedPrefix(p.owner_id, p.start, p.num_tokens, dict(p.tokens_by_instance), p.num_readers)
                for p in engine.largest_prefixes
            ],
            num_judged=self._past.num_judged,
            num_met=self._past.num_met,
            long_prompt=ceil(LONG_SHARE * self._longest_prompt),
            num_computed_tokens=snapshot.stats.num_computed_tokens,
            num_output_tokens=snapshot.stats.num_output_tokens,
            num_batches_by_dop=dict(snapshot.stats.num_batches_by_dop),
            errors=dict(request_observers.errors()),
            loans=[
                (loan.creditor_id, loan.debtor_id, loan.num_tokens, loan.since, loan.reason)
                for loan in self._cluster.loans()
            ],
        )

    def _new_runs(self) -> list[RequestRun]:
        """Return the requests that have ended since the last tick, oldest first."""
        reported = self._reported_run_at
        new = list(
            takewhile(lambda run: (run.ended_at or 0.0) > reported, reversed(self._request_observers.over))
        )
        if new:
            self._reported_run_at = new[0].ended_at or reported
        return new[::-1]

    def _run(self, run: RequestRun, snapshot: Snapshot) -> FeedRun:
        view = snapshot.request.get(run.request_id)
        target = self._request_observers.target_of(run)
        return FeedRun(
            run.request_id,
            run.arrived_at,
            waited=None if run.started_at is None else run.started_at - run.arrived_at,
            prompt=run.num_prompt_tokens,
            cached=run.num_cached_tokens,
            output=run.num_output_tokens if view is None else view.num_output_tokens,
            end=run.end,
            state=_state(run),
            dops=tuple(run.dops),
            ttft=run.ttft,
            tpot=run.tpot,
            ttft_target=target.ttft,
            tpot_target=target.tpot,
        )


def _state(run: RequestRun) -> str:
    if run.end is not None:
        return run.end
    if run.started_at is None:
        return "waits"
    return "prefill" if run.first_token_at is None else "decode"


def _ended(batch: BatchSlice) -> FeedBatch:
    return FeedBatch(
        batch.batch_id,
        batch.group.instance_ids,
        batch.phase,
        batch.started_at,
        batch.ended_at,
        len(batch.request_ids),
        batch.longest_prompt,
        tuple(num_tokens for _, num_tokens in batch.kv_used),
        batch.holder_ids,
        batch.num_recomputed_tokens,
    )


def _running(batch: RunningBatch, snapshot: Snapshot) -> FeedBatch:
    plan = batch.plan
    prefilled = {r for r in plan.request_ids if sum(len(b.positions) for b in plan.blocks_of(r)) > 1}
    phase = phase_with(bool(prefilled), len(prefilled) < len(plan.request_ids))
    prompts = (snapshot.request[i].num_prompt_tokens for i in prefilled if i in snapshot.request)
    return FeedBatch(
        batch.batch_id,
        plan.group.instance_ids,
        phase,
        batch.started_at,
        None,
        len(plan.request_ids),
        max(prompts, default=0),
        holders=batch.holder_ids,
    )


def _change(change: InstanceChange) -> FeedChange:
    return FeedChange(change.instance_id, change.kind, change.time, change.reason)


def _move(move: KVMove) -> FeedMove:
    return FeedMove(
        move.source_id, move.destination_id, move.num_tokens, move.started_at, move.ended_at, move.is_copy
    )


def _buckets(snapshot: Snapshot) -> list[Bucket]:
    buckets = [Bucket(below) for below in (*LENGTH_EDGES, None)]
    for view in snapshot.waiting:
        bucket = buckets[bisect_right(LENGTH_EDGES, view.num_prompt_tokens)]
        bucket.num_requests += 1
        bucket.num_tokens += view.num_prompt_tokens
        bucket.oldest = max(bucket.oldest, snapshot.now - view.arrival_time)
    return buckets
