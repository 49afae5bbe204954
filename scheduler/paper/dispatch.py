"""Dispatch as published: the prompts R_p that run next, and the decode batches that wait for them."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from loong.core.request import RequestView
from loong.scheduler.common.future_kv import FutureKV, dispatch_cost, dispatch_gain
from loong.scheduler.paper.cluster import DecodeBatch, PaperCluster


@dataclass(slots=True)
class Scan:
    """Scans waiting prompts, first come, first served; it stops at the first that may not run."""

    cluster: PaperCluster
    chosen: list[RequestView] = field(default_factory=list)
    future: FutureKV = field(init=False)

    def __post_init__(self) -> None:
        self.future = FutureKV.of(self.cluster.planning_view.lengths)

    def next_prompts(self, dop: int, num_free: int) -> list[RequestView]:
        """Return R_p's next prompts on `dop` instances, of which `num_free` slots are for R_p.

        Prompts are added until together they are compute-bound, or a request would ever be evicted if all
        decoded a step at a time together.
        """
        prompts: list[RequestView] = []
        future = self.future
        num_left = num_free - sum(view.num_uncomputed_tokens for view in self.chosen)
        for view in self.cluster.planning_view.waiting[len(self.chosen) :]:
            num_left -= view.num_uncomputed_tokens
            future = future.adding(view)
            if num_left < 0 or future.peak > self.cluster.planning_view.capacity:
                break
            if self._is_compute_bound([*self.chosen, *prompts], dop):
                break
            prompts.append(view)
        return prompts

    def choose(self, prompts: Iterable[RequestView]) -> None:
        """Add to R_p."""
        for view in prompts:
            self.chosen.append(view)
            self.future = self.future.adding(view)

    def _is_compute_bound(self, prompts: list[RequestView], dop: int) -> bool:
        """Return whether a step takes twice as long as one that only begins and reads the weights."""
        terms = self.cluster.cost_model.prefill_terms(dop)
        return self.cluster.prefill_time(prompts, dop) > 2 * terms.least


def dispatch(cluster: PaperCluster) -> tuple[list[RequestView], list[DecodeBatch]]:
    """Return the prompts R_p, and the decode batches whose groups they may use too, by (1) and (2).

    With nothing idle and no batch worth stopping, R_p is the first prompt, and allocation finds instances for
    it.
    """
    if not cluster.planning_view.waiting:
        return [], []
    scan, stopped = Scan(cluster), list[DecodeBatch]()
    dop, num_free = len(cluster.idle), cluster.num_free(cluster.idle)
    if dop:
        scan.choose(scan.next_prompts(dop, num_free))
    for batch in sorted(cluster.decoding, key=lambda b: (-cluster.num_spare(b), b.instance_ids)):
        wider, num_wider = dop + len(batch.instance_ids), num_free + cluster.num_spare(batch)
        prompts = scan.next_prompts(wider, num_wider)
        if prompts and _gain(cluster, batch, prompts) > dispatch_cost(
            cluster.prefill_time([*scan.chosen, *prompts], wider), (view.max_tokens for view in batch.views)
        ):
            scan.choose(prompts)
            stopped.append(batch)
            dop, num_free = wider, num_wider
    if not scan.chosen:
        num_anywhere = num_free + sum(map(cluster.num_spare, cluster.decoding))
        scan.choose(scan.next_prompts(1, num_anywhere)[:1])
    return scan.chosen, stopped


def _gain(cluster: PaperCluster, batch: DecodeBatch, prompts: Iterable[RequestView]) -> float:
    """Return (2). A request's decode time is its declared output at the predicted pace of its batch."""
    now, decode_time, num_requests = cluster.planning_view.snapshot.now, 0.0, 0
    for other in cluster.decoding:
        decode_time += cluster.decode_step_time(other) * sum(view.max_tokens - 1 for view in other.views)
        num_requests += len(other.views)
    return dispatch_gain(
        decode_time / num_requests,
        [0.0 if view.first_token_time is None else now - view.first_token_time for view in batch.views],
        (view.num_prompt_tokens for view in prompts),
    )
