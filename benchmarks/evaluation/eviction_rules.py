"""Prefix hits of caches of one size that evict by other rules than the last use (LRU).

Every rule evicts from the ends of sequences. `worth` divides the time to compute a token again by the time
since its last use. `GDSF` (GreedyDual-Size-Frequency) adds the uses times that time to the priority of what
went last. `LRU-2` goes by the use before the last one, and remembers it for as many tokens as there is room.
`ARC`, `S3-FIFO` and `SLRU` (segmented LRU) have a part for what was used once and one for what was used
again. ARC learns the size of the first part from what it evicted, S3-FIFO gives it a tenth, and SLRU a half.
The order is that of arrival, as if answers took no time. Needs no device.

    python benchmarks/evaluation/eviction_rules.py --trace conversation.jsonl synthetic.jsonl    # minutes
"""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from heapq import heapify, heappop, heappush
from itertools import islice
from math import inf
from operator import itemgetter
from pathlib import Path
from typing import TypeAlias

sys.path.append(str(Path(__file__).parents[1] / "support"))

from result import print_result, script_parser

from loong.hardware.model_shape import shape_of
from loong.model.shapes import find_config
from loong.simulation.cluster import Hardware
from loong.workloads.data_file import DataFile
from loong.workloads.metrics.prefix_hits import PrefixCache
from loong.workloads.report.report import table
from loong.workloads.request import AnswerRun, RequestShape
from loong.workloads.workload import endless_workload, pace_of

MODEL, DEVICE, CHUNK = "llama-3.1-8b", "h200", 512
WORKLOADS, RATE = ("agents", "chats", "leval(4)"), 4.0
ROOMS = (0.5, 0.25, 0.125)  # of all tokens that are ever held
SMALL = 0.1  # the part of S3-FIFO for what is new, as in its paper
MOST_USES = 3  # that S3-FIFO counts
SOON = 1e-9  # seconds
Key: TypeAlias = tuple[int, int | None]
Timed: TypeAlias = tuple[float, RequestShape]


@dataclass(slots=True, eq=False)
class Node:
    """The first tokens of a run that are held, from a position on, and the runs that follow them.

    It is in part `part` of a cache. What has the lowest `priority`, and then the lowest `number`, goes first.
    """

    start: int = 0
    name: int = 0
    parent: "Node | None" = None
    key: Key = (0, None)
    num_tokens: int = 0
    size: int = 0  # the most that it had
    last: float = -inf
    num_uses: int = 0
    part: int = 0
    priority: float = 0.0
    number: int = 0
    after: "dict[Key, Node]" = field(default_factory=dict)


@cache
def seconds_again(start: int) -> float:
    """Return the seconds in which a chunk after `start` tokens is computed again."""
    hardware = Hardware(shape_of(find_config(MODEL, "dummy")), DEVICE, 1)
    terms = hardware.cluster("esp").cost_model.prefill_terms(1)
    return terms.time(CHUNK, CHUNK * start, CHUNK**2)


def cost(node: Node) -> float:
    """Return the seconds in which a chunk where a node begins is computed again."""
    return seconds_again(node.start // CHUNK * CHUNK)


class Ghosts:
    """Nodes that were evicted, by name, with their tokens and a time: the latest ones."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._nodes: dict[int, tuple[int, float]] = {}

    def add(self, node: Node, capacity: float) -> None:
        """Remember a node, and forget the oldest beyond a number of tokens."""
        self._nodes[node.name] = (node.size, node.last)
        self.num_tokens += node.size
        while self.num_tokens > capacity:
            self.take(next(iter(self._nodes)))

    def take(self, name: int) -> tuple[int, float] | None:
        """Forget a node, and return its tokens and its time, if it was known."""
        found = self._nodes.pop(name, None)
        self.num_tokens -= 0 if found is None else found[0]
        return found


class LRU:
    """Prompts and answers as a tree of runs. What was used least recently goes first, from its end."""

    num_parts = 1

    def __init__(self, capacity: int) -> None:
        self.capacity, self.num_taken, self.now = capacity, 0, -inf
        self.num_tokens = [0] * self.num_parts
        self.heaps: list[list[tuple[float, int, int, Node]]] = [[] for _ in range(self.num_parts)]
        self.root = Node()

    @cached_property
    def ghosts(self) -> list[Ghosts]:
        """Return what was evicted, by part."""
        return [Ghosts() for _ in range(self.num_parts)]

    def take(self, shape: RequestShape, now: float) -> int:
        """Return how many tokens of a prompt are held, then hold the prompt and its answer."""
        self.now = now
        node, offset, position, num_shared, is_shared = self.root, 0, 0, 0, True
        answer = AnswerRun(shape.num_output_tokens - 1)
        path: list[Node] = []
        for run in filter(lambda run: run.num_tokens, (*shape.prompt, answer)):
            key = (offset, None if isinstance(run, AnswerRun) else run.seed)
            node = node.after.setdefault(key, Node(position, hash((node.name, key)), node, key))
            held = node.num_tokens
            if is_shared and run is not answer:
                num_shared += min(held, run.num_tokens)
                is_shared = held >= run.num_tokens
            self._place(node, is_new=not held)
            self._grow(node, max(0, run.num_tokens - held))
            path.append(node)
            offset, position = run.num_tokens, position + run.num_tokens
        self._use(path)
        while sum(self.num_tokens) > self.capacity:
            self._evict(self._going())
        return min(num_shared, sum(run.num_tokens for run in shape.prompt) - 1)

    def _prioritize(self, node: Node) -> None:
        """Set the priority of a node that is used."""

    def _part_of(self, node: Node) -> int:
        """Return the part for a node that is used, and that is new if it has no tokens."""
        return node.part

    def _next_part(self) -> int:
        """Return the part that something goes from next, if it has any."""
        return 0

    def _forget(self, node: Node) -> None:
        """Note that a node has been evicted."""

    def _place(self, node: Node, *, is_new: bool) -> None:
        node.num_uses = 1 if is_new else node.num_uses + 1
        part = self._part_of(node)
        self.num_tokens[node.part] -= node.num_tokens
        self.num_tokens[part] += node.num_tokens
        node.part = part

    def _grow(self, node: Node, num_tokens: int) -> None:
        node.num_tokens += num_tokens
        node.size = max(node.size, node.num_tokens)
        self.num_tokens[node.part] += num_tokens

    def _use(self, path: Sequence[Node]) -> None:
        for node in reversed(path):
            self.num_taken += 1
            node.number = self.num_taken
            self._prioritize(node)
            node.last = self.now
        if path and not path[-1].after:
            self._push(path[-1])

    def _push(self, node: Node) -> None:
        heappush(self.heaps[node.part], (node.priority, node.number, id(node), node))

    def _going(self) -> Node:
        """Return the leaf that goes next."""
        first = self._next_part()
        for heap in (self.heaps[first], *self.heaps):
            while heap:
                priority, number, _, node = heap[0]
                is_leaf = node.num_tokens and not node.after
                if is_leaf and (priority, number) == (node.priority, node.number):
                    return node
                heappop(heap)
        raise AssertionError("all tokens are held by some leaf, or before one")

    def _evict(self, node: Node) -> None:
        num_evicted = min(node.num_tokens, sum(self.num_tokens) - self.capacity)
        self._grow(node, -num_evicted)
        if not node.num_tokens and (parent := node.parent) is not None:
            self._forget(node)
            del parent.after[node.key]
            if not parent.after and parent.parent is not None:
                self._push(parent)


class Worth(LRU):
    """The least worth goes first: all leaves are compared when something goes."""

    sorted_at = -inf

    def _going(self) -> Node:
        if self.heaps[0] and self.sorted_at != self.now:
            leaves = {id(node): node for *_, node in self.heaps[0] if node.num_tokens and not node.after}
            for node in leaves.values():
                node.priority = cost(node) / (self.now - node.last + SOON)
            self.heaps[0] = [(n.priority, n.number, id(n), n) for n in leaves.values()]
            heapify(self.heaps[0])
            self.sorted_at = self.now
        return super()._going()


class GDSF(LRU):
    """The lowest sum of its cost and of the priority of KV that went before its last use, goes first."""

    aged = 0.0

    def _prioritize(self, node: Node) -> None:
        node.priority = self.aged + node.num_uses * cost(node)

    def _forget(self, node: Node) -> None:
        self.aged = max(self.aged, node.priority)


class LRU2(LRU):
    """KV that was used only once goes first, and then that with the oldest use before its last."""

    def _part_of(self, node: Node) -> int:
        if not node.num_tokens and (known := self.ghosts[0].take(node.name)) is not None:
            node.last = known[1]
        return node.part

    def _prioritize(self, node: Node) -> None:
        node.priority = node.last

    def _forget(self, node: Node) -> None:
        self.ghosts[0].add(node, self.capacity)


class SLRU(LRU):
    """KV that was used once goes first while it has more than half of the room."""

    num_parts = 2

    def _part_of(self, node: Node) -> int:
        return int(node.num_uses > 1)

    def _next_part(self) -> int:
        return int(self.num_tokens[0] <= self.capacity / 2)


class ARC(LRU):
    """The same, but the size for what was used once follows from what is used after its eviction."""

    num_parts, size = 2, 0.0

    def _part_of(self, node: Node) -> int:
        if node.num_uses > 1:
            return 1
        for part, sign in ((0, 1), (1, -1)):
            num_known, num_other = (self.ghosts[p].num_tokens for p in (part, 1 - part))
            if (known := self.ghosts[part].take(node.name)) is not None:
                change = sign * known[0] * max(1.0, num_other / max(1, num_known))
                self.size = min(float(self.capacity), max(0.0, self.size + change))
                return 1
        return 0

    def _next_part(self) -> int:
        return int(self.num_tokens[0] <= self.size)

    def _forget(self, node: Node) -> None:
        most = self.capacity - self.size if node.part == 0 else self.capacity
        self.ghosts[node.part].add(node, most)


class S3FIFO(LRU):
    """The first to come goes first, from a small part or a large one, unless it was used meanwhile."""

    num_parts = 2

    def _part_of(self, node: Node) -> int:
        if node.num_tokens:
            return node.part
        return int(self.ghosts[0].take(node.name) is not None)

    def _prioritize(self, node: Node) -> None:
        node.num_uses = min(node.num_uses, 1 + MOST_USES)
        if node.num_uses == 1:
            node.priority = float(self.num_taken)

    def _next_part(self) -> int:
        return int(self.num_tokens[0] <= SMALL * self.capacity)

    def _going(self) -> Node:
        while (node := super()._going()).num_uses > 1:
            node.num_uses = 1 if node.part == 0 else node.num_uses - 1
            self.num_tokens[node.part] -= node.num_tokens
            self.num_tokens[1] += node.num_tokens
            self.num_taken += 1
            node.part, node.priority, node.number = 1, float(self.num_taken), self.num_taken
            self._push(node)
        return node

    def _forget(self, node: Node) -> None:
        if node.part == 0:
            self.ghosts[0].add(node, self.capacity)


RULES = {
    "LRU": LRU,
    "worth": Worth,
    "GDSF": GDSF,
    "LRU-2": LRU2,
    "ARC": ARC,
    "S3-FIFO": S3FIFO,
    "SLRU": SLRU,
}


@dataclass(frozen=True, slots=True)
class Hits:
    """Shares of the input tokens of a workload, by rule, in a part `room` of all tokens ever held."""

    workload: str
    seed: int
    num_requests: int
    room: float
    ideal: float
    by_rule: dict[str, float]


def in_order(workload: str, num_requests: int, seed: int) -> list[Timed]:
    """Return prompts with the times at which they would arrive if answers took no time."""
    pace = pace_of(workload, None).request_rate
    rate = RATE if pace == float("inf") else pace
    timed: list[Timed] = []
    for request in islice(endless_workload(workload, seed=seed, request_rate=rate), num_requests):
        shape = request.shape
        is_after = shape.is_follower and timed
        timed.append((timed[-1][0] + shape.think_time if is_after else request.arrival_time, shape))
    return sorted(timed, key=itemgetter(0))


def share(found: Sequence[int], timed: Sequence[Timed]) -> float:
    """Return the part of the input tokens that are held."""
    return sum(found) / sum(run.num_tokens for _, shape in timed for run in shape.prompt)


def main() -> None:
    parser = script_parser("eviction_rules", __doc__)
    parser.add_argument("--workload", nargs="*", default=WORKLOADS, help=f"({' '.join(WORKLOADS)})")
    parser.add_argument("--trace", nargs="*", default=(), help="files of requests, such as Mooncake's")
    parser.add_argument("--num-requests", type=int, default=1_500, help="of each workload (%(default)s)")
    parser.add_argument("--seed", type=int, nargs="+", default=[0, 1], help="of workloads (%(default)s)")
    args = parser.parse_args()
    found: list[Hits] = []
    traces = [(str(DataFile(trace)), 0) for trace in args.trace]
    for workload, seed in (*traces, *[(workload, s) for workload in args.workload for s in args.seed]):
        timed = in_order(workload, args.num_requests, seed)
        whole = PrefixCache()
        ideal = share([whole.take(shape) for _, shape in timed], timed)
        for room in ROOMS:
            by_rule = {}
            for name, rule in RULES.items():
                held = rule(int(room * whole.num_tokens))
                by_rule[name] = share([held.take(shape, now) for now, shape in timed], timed)
            found.append(Hits(workload, seed, len(timed), room, ideal, by_rule))
            print(found[-1], file=sys.stderr, flush=True)
    rows = [
        (
            hits.workload,
            f"{hits.seed}",
            f"{hits.room:.1%}",
            f"{hits.ideal:.1%}",
            *[f"{h:.1%}" for h in hits.by_rule.values()],
        )
        for hits in found
    ]
    print(table(("workload", "seed", "room", "ideal", *RULES), rows))
    numbers = {"command": shlex.join(["python", *sys.argv]), "runs": list(map(asdict, found))}
    print_result("eviction_rules", numbers, save=args.save)


if __name__ == "__main__":
    main()
