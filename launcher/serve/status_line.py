"""The log lines of a running server: one line now and then."""

import asyncio
import logging

from loong.core.snapshot import Snapshot
from loong.engine.client import ClusterView

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 10.0


async def log_status(engine: ClusterView) -> None:
    """Log a line every interval in which anything happened, until cancelled."""
    before = engine.snapshot()
    while True:
        await asyncio.sleep(INTERVAL_SECONDS)
        now = engine.snapshot()
        if now.stats != before.stats or now.request:
            logger.info("%s", status_line(before, now))
        before = now


def status_line(before: Snapshot, now: Snapshot) -> str:
    """Return throughput between two snapshots, and requests and KV at the second."""
    seconds = now.now - before.now
    num_computed = now.stats.num_computed_tokens - before.stats.num_computed_tokens
    num_output = now.stats.num_output_tokens - before.stats.num_output_tokens
    counts = {
        dop: count - before.stats.num_batches_by_dop.get(dop, 0)
        for dop, count in sorted(now.stats.num_batches_by_dop.items())
    }
    num_cached = now.stats.num_cached_tokens - before.stats.num_cached_tokens
    cached = f"{num_cached / seconds:.0f} tokens/s from the prefix cache, " if num_cached else ""
    by_dop = " ".join(f"{dop}:{count}" for dop, count in counts.items() if count)
    return (
        f"{num_computed / seconds:.0f} tokens/s computed, {cached}{num_output / seconds:.0f} tokens/s out; "
        f"{len(now.running)} running, {len(now.waiting) + len(now.following)} waiting; "
        f"KV {100 * now.kv_used / now.kv_capacity:.1f} % used; "
        + (f"batches by DoP {by_dop}" if by_dop else "no new batch")
    )
