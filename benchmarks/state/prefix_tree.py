"""Measures the processor time that the prefix cache takes for a request, with many owners of KV.

Each of --num-owners requests had a system prompt of 1,000 tokens and 40 of its own, and left its KV. Then
--num-requests requests of each length come, one after the other. Each has what the owner before it had but
for its last tenth, reads that, computes the rest, and ends. There are 8 instances, and each holds an eighth
of all KV. "arrive" matches the tokens of a request and makes its view. "borrow" lets it read what is there.
"evict" makes room for what it computes, and "end" keeps its KV. Ceiling: 0.2 ms for all of a request with
2,000 tokens.
"""

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from time import thread_time

sys.path.append(str(Path(__file__).parents[1] / "support"))

from result import print_result, script_parser

from loong.core.instance import ElasticInstance, InstanceKind
from loong.core.placement import striped
from loong.core.plan import Borrowing
from loong.core.positions import subtract
from loong.core.request import Request, SamplingParams
from loong.processes.gc_tuning import tune_gc
from loong.state.accounting import Accounting

CEILING = 0.2e-3
NUM_INSTANCES, NUM_SYSTEM_TOKENS, NUM_OWN_TOKENS = 8, 1000, 40
PARTS = ("arrive", "borrow", "end", "evict")
ALL_IDS = tuple(range(NUM_INSTANCES))


class Cache:
    """The accounting of instances whose pools are full of KV that nobody reads."""

    def __init__(self, kv_capacity: int) -> None:
        self.accounting = Accounting(keeps_prefixes=True)
        self.spent: dict[str, list[float]] = {part: [] for part in PARTS}
        for instance_id in ALL_IDS:
            instance = ElasticInstance(instance_id, 1, InstanceKind.FULL, kv_capacity)
            self.accounting.pools.join(instance)
        self.num_requests = 0

    def serve(self, token_ids: tuple[int, ...], home_ids: tuple[int, ...]) -> None:
        """Let a request read what there is, compute the rest on some instances, and end."""
        requests, pools = self.accounting.requests, self.accounting.pools
        self.num_requests += 1
        request_id = f"r{self.num_requests}"
        request = Request(request_id, token_ids, SamplingParams(), arrival_time=0.0)
        self._time("arrive", lambda: requests.arrive(request))
        live = requests.by_id[request_id]
        cached = tuple([c.segment for c in requests.views.views[request_id].cached])
        if cached:
            borrowing = Borrowing(request_id, cached)
            self._time("borrow", lambda: requests.borrow(borrowing))
        rest = subtract((range(len(token_ids)),), *[segment.positions for segment in cached])
        new = striped(request_id, rest[0], home_ids)
        live.placement = live.placement.adding(new.segments)
        pools.reserve(new.tokens_by_instance())
        self._time("evict", requests.owners.make_room)
        live.output_token_ids.append(1)
        live.has_ended = True
        self._time("end", lambda: requests.settle((live,)))
        requests.owners.take_instructions()

    def _time(self, part: str, work: Callable[[], object]) -> None:
        """Measure some work with the views that are new after it."""
        start = thread_time()
        work()
        self.accounting.requests.refresh()
        self.spent[part].append(thread_time() - start)


def measure(cache: Cache, num_tokens: int, num_requests: int) -> dict[str, tuple[float, float]]:
    """Return the median and the P95 of each part, and of all, over requests of one length."""
    tokens = tuple(range(10, 10 + num_tokens))
    cache.serve(tokens, ALL_IDS)
    for part in PARTS:
        cache.spent[part].clear()
    for number in range(num_requests):
        new = tuple(range(10**8 + number * num_tokens, 10**8 + number * num_tokens + num_tokens // 10))
        tokens = (*tokens[: num_tokens - len(new)], *new)
        cache.serve(tokens, (number % NUM_INSTANCES,))
    spent = {**cache.spent, "all": [sum(parts) for parts in zip(*cache.spent.values(), strict=True)]}
    return {part: (median(values), quantiles(values, n=20)[-1]) for part, values in spent.items()}


def main() -> None:
    parser = script_parser("prefix_tree", __doc__)
    parser.add_argument(
        "--num-owners", type=int, default=100_000, help="number of owners at the start (%(default)s)"
    )
    parser.add_argument(
        "--num-requests", type=int, default=200, help="number of requests of a length (%(default)s)"
    )
    parser.add_argument(
        "--num-tokens", type=int, nargs="+", default=[2_000, 100_000], help="lengths (%(default)s)"
    )
    args = parser.parse_args()
    cache = Cache(
        args.num_owners * NUM_OWN_TOKENS // NUM_INSTANCES + NUM_SYSTEM_TOKENS + max(args.num_tokens)
    )
    system = tuple(range(10**9, 10**9 + NUM_SYSTEM_TOKENS))
    for number in range(args.num_owners):
        first = 10**6 + number * NUM_OWN_TOKENS
        cache.serve((*system, *range(first, first + NUM_OWN_TOKENS)), (number % NUM_INSTANCES,))
    gc.collect()
    gc.freeze()
    tune_gc()
    num_owners = len(cache.accounting.requests.owners.by_id)
    print(f"{num_owners:,} owners; us a request: median (P95)\n")
    print(f"{'tokens':>9}" + "".join(f"{part:>18}" for part in (*PARTS, "all")))
    rows = {}
    for num_tokens in args.num_tokens:
        row = rows[num_tokens] = measure(cache, num_tokens, args.num_requests)
        shown = "".join(f"{f'{1e6 * mid:.0f} ({1e6 * high:.0f})':>18}" for mid, high in row.values())
        print(f"{num_tokens:>9,}{shown}")
    numbers = {"num_owners": num_owners, "ceiling": CEILING, "seconds_by_num_tokens": rows}
    print_result("prefix_tree", numbers, save=args.save)


if __name__ == "__main__":
    main()
