"""An observer of the loop that publishes what is stored in the prefix cache, and what is removed."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import time

from loong.core.applied import Applied
from loong.core.events import Event, InstanceLost
from loong.core.instructions import Instruction
from loong.core.observer import Observer
from loong.core.plan import IterationPlan
from loong.core.snapshot import Snapshot
from loong.observability.kv_events.blocks import CachedBlocks
from loong.observability.kv_events.config import KVEventsConfig
from loong.observability.kv_events.messages import KVEventBatch
from loong.observability.kv_events.publisher import KVPublisher
from loong.state.prefix_tree import PrefixTree

logger = logging.getLogger(__name__)


class KVEvents(Observer):
    """Publishes the news of cached blocks after each event and each plan that has any.

    A batch for which there is no room is dropped. The next one that has room says all that is cached.
    """

    def __init__(self, blocks: CachedBlocks, put: Callable[[KVEventBatch], bool]) -> None:
        """Set up. `put` takes a batch, or returns False if it has no room."""
        self._blocks, self._put = blocks, put
        self.num_dropped = 0
        self._lacks = False

    def on_event(self, event: Event, applied: Applied, /) -> None:
        """Publish what an event changes."""
        if isinstance(event, InstanceLost):
            self._blocks.see_loss()
        self._publish(applied.instructions)

    def on_plan(
        self,
        _events: Sequence[Event],
        _snapshot: Snapshot,
        _plan: IterationPlan,
        instructions: Sequence[Instruction],
        /,
    ) -> None:
        """Publish what a plan changes."""
        self._publish(instructions)

    def _publish(self, instructions: Sequence[Instruction]) -> None:
        self._blocks.see(instructions)
        events = self._blocks.news()
        if not events:
            return
        if self._put(KVEventBatch(time(), self._blocks.all() if self._lacks else events)):
            self._lacks = False
            return
        self.num_dropped += 1
        if not self._lacks:
            self._lacks = True
            logger.warning("KV events are dropped, since their queue is full; the next ones will say all")


@contextmanager
def kv_events(config: KVEventsConfig | None, tree: PrefixTree) -> Iterator[tuple[Observer, ...]]:
    """Yield the observer that publishes events of a tree, if they are on. Raises `ConfigError`."""
    if config is None or not config.is_on:
        yield ()
        return
    publisher = KVPublisher(config)
    logger.info("KV events at %s, replays at %s", publisher.endpoint, publisher.replay_endpoint)
    try:
        yield (KVEvents(CachedBlocks(tree, config.block_size), publisher.put),)
    finally:
        publisher.close()
