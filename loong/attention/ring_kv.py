"""The KV that travels round a ring: once what several requests read, and the rest of each request."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from loong.attention.attention_step import AttentionStep
from loong.attention.shared import SharedReaders
from loong.core.placement import InstanceId
from loong.core.plan import Transfer
from loong.core.request import RequestId


@dataclass(frozen=True, slots=True)
class RingKV:
    """The rows of the block that one instance sends, equal on all members of a group.

    The shared slots of `readers` come first, group by group. Behind them comes the rest of each request:
    its KV from before the step, then the KV that the step makes.
    """

    source_id: InstanceId
    readers: SharedReaders
    rest: Mapping[RequestId, tuple[range, ...]]
    first_rows: Mapping[RequestId, int]  # of the rest
    num_rows: int

    @classmethod
    def of(cls, step: AttentionStep, source_id: InstanceId) -> "RingKV":
        """Return what an instance sends in a step, given as layers without a window see it."""
        firsts = {
            request_id: min(block.positions[0] for block in step.batch.blocks_of(request_id))
            for request_id in step.requests(Transfer.KV)
        }
        readers = SharedReaders.of((source_id,), step.placements, firsts, step.least_saved)
        rest, first_rows, num_rows = {}, {}, readers.num_listed
        for request_id in firsts:
            rest[request_id] = readers.alone(request_id, step.kv_on(source_id, request_id))
            first_rows[request_id] = num_rows
            num_rows += sum(map(len, rest[request_id]))
        return cls(source_id, readers, rest, first_rows, num_rows)

    def pieces(self, request_id: RequestId) -> Iterator[tuple[int, tuple[range, ...]]]:
        """Yield the KV of a request as positions in consecutive rows, each with its first row."""
        row = 0
        for number, group in enumerate(self.readers.reads.groups):
            if request_id in self.readers.members(number):
                yield row, group.positions
            row += group.num_keys
        yield self.first_rows[request_id], self.rest[request_id]
