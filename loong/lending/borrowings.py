"""Borrowing as in DistKV-LLM: a full instance asks the gManager for creditors, and these in turn."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from loong.core.placement import InstanceId
from loong.lending.block_map import BlockMap
from loong.lending.messages import AskCreditors, Envelope
from loong.lending.moves import Moves
from loong.lending.peers import Peers


@dataclass(slots=True)
class Borrowing:
    """Blocks that an instance lacks, the number of its last question, and the creditors still to be asked."""

    num_blocks: int
    number: int
    asked_at: float
    creditor_ids: list[InstanceId] = field(default_factory=list)
    is_asking_creditor: bool = False


class Borrowings:
    """The loans that an engine's instances look for: at most one an instance."""

    def __init__(self, blocks: BlockMap, moves: Moves, peers: Peers, retry_seconds: float) -> None:
        self.open: dict[InstanceId, Borrowing] = {}
        self.num_failed = 0
        self._blocks, self._moves, self._peers = blocks, moves, peers
        self._retry_seconds = retry_seconds

    def start(self, instance_id: InstanceId, num_blocks: int, now: float) -> list[Envelope]:
        """Ask for creditors. Nothing happens while a loan is looked for, or without a gManager."""
        if instance_id in self.open:
            return []
        number = self._peers.new_number()
        asked = self._peers.message(instance_id, None, number, AskCreditors(num_blocks))
        if asked:
            self.open[instance_id] = Borrowing(num_blocks, number, now)
        return asked

    def on_creditors(
        self, instance_id: InstanceId, number: int, creditor_ids: Sequence[InstanceId], now: float
    ) -> list[Envelope]:
        """Ask the first of the creditors."""
        found = self.open.get(instance_id)
        if found is None or found.is_asking_creditor or found.number != number:
            return []
        found.creditor_ids, found.is_asking_creditor = list(creditor_ids), True
        return self._ask_next(instance_id, found, now)

    def on_allowed(
        self, instance_id: InstanceId, number: int, is_allowed: bool, now: float
    ) -> list[Envelope]:
        """End the search if a creditor has room, or ask the next."""
        found = self.open.get(instance_id)
        if found is None or not found.is_asking_creditor or found.number != number:
            return []
        if is_allowed:
            del self.open[instance_id]
            return []
        return self._ask_next(instance_id, found, now)

    def tick(self, now: float) -> Iterator[Envelope]:
        """Ask the next creditor where one says nothing, and end searches that nobody answers."""
        for instance_id, found in list(self.open.items()):
            if found.asked_at + self._retry_seconds > now:
                continue
            if found.is_asking_creditor:
                yield from self._ask_next(instance_id, found, now)
            else:
                del self.open[instance_id]

    def _ask_next(self, instance_id: InstanceId, found: Borrowing, now: float) -> list[Envelope]:
        """Ask the next creditor for room for blocks of the longest request, or end the search."""
        here = [r for r, request in self._blocks.homes.items() if request.home_id == instance_id]
        pool = self._blocks.pools[instance_id]
        for request_id in sorted(here, key=lambda r: (-pool.count(r), r))[:1]:
            while found.creditor_ids:
                creditor_id = found.creditor_ids.pop(0)
                asked = self._moves.start(request_id, found.num_blocks, instance_id, creditor_id, now)
                if asked:
                    found.number, found.asked_at = asked[0].number, now
                    return asked
        self.num_failed += 1
        del self.open[instance_id]
        return []
