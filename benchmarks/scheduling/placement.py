"""Measures the scheduler's time for a placement of two million tokens.

Stripes a prompt over a group, plans its full prefill, and checks both, as the loop does before every step.
All of it together is to stay below a millisecond, for prompts of any length: positions are ranges and are
never enumerated. The last row is the same prompt after a prefill in chunks, each at another DoP.
"""

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter

sys.path.append(str(Path(__file__).parents[1] / "support"))

from result import print_result, script_parser

from loong.core.check_plan import check_plan
from loong.core.instance import ElasticInstance, ESPGroup, InstanceKind
from loong.core.placement import Placement, striped
from loong.core.plan import BatchPlan, IterationPlan, QueryBlock, Transfer
from loong.core.positions import is_partition, stripe
from loong.core.request import RequestView
from loong.core.snapshot import Snapshot

CEILING = 1e-3
REQUEST = "prompt"


def prefill(prompt: range, ring: tuple[int, ...]) -> BatchPlan:
    blocks = (
        QueryBlock(REQUEST, stripe(prompt, i, len(ring)), instance_id, Transfer.KV)
        for i, instance_id in enumerate(ring)
    )
    return BatchPlan(ESPGroup(ring), tuple(blocks), striped(REQUEST, prompt, ring).segments)


def waiting_prompt(num_tokens: int, num_instances: int) -> Snapshot:
    """Return a snapshot of a prompt that waits for instances with just enough room."""
    room = -(-num_tokens // num_instances)
    return Snapshot(
        now=0.0,
        instances=tuple(ElasticInstance(i, 1, InstanceKind.FULL, room) for i in range(num_instances)),
        waiting=(RequestView(REQUEST, num_tokens, 0, 16, 0.0, None, Placement()),),
    )


def check_placement(placement: Placement, prompt: range) -> None:
    if not is_partition((segment.positions for segment in placement.segments), prompt):
        raise AssertionError(f"{len(placement.segments)} segments do not hold {prompt}, each position once")


def chunked(prompt: range, num_instances: int) -> Placement:
    """Return the placement of a prompt after chunks on 1, 2, ... instances and on all again."""
    edges = [len(prompt) * i // num_instances for i in range(num_instances + 1)]
    placement = Placement()
    for dop, (start, stop) in enumerate(pairwise(edges), start=1):
        placement = placement.adding(striped(REQUEST, prompt[start:stop], tuple(range(dop))).segments)
    return placement


def seconds_of(run: Callable[[], object], num_repeats: int) -> list[float]:
    """Return the seconds of each of many runs, sorted; the first tenth warms up."""
    times = []
    for _ in range(num_repeats + num_repeats // 10):
        start = perf_counter()
        run()
        times.append(perf_counter() - start)
    return sorted(times[num_repeats // 10 :])


def measure(num_tokens: int, num_instances: int, num_repeats: int) -> dict[str, dict[str, float]]:
    prompt, ring = range(num_tokens), tuple(range(num_instances))

    def everything() -> None:
        check_placement(striped(REQUEST, prompt, ring), prompt)
        check_plan(waiting_prompt(num_tokens, num_instances), IterationPlan((prefill(prompt, ring),)))

    placement, plan = striped(REQUEST, prompt, ring), IterationPlan((prefill(prompt, ring),))
    snapshot, mixed = waiting_prompt(num_tokens, num_instances), chunked(prompt, num_instances)
    rows: dict[str, Callable[[], object]] = {
        "stripe": lambda: striped(REQUEST, prompt, ring),
        "check the placement": lambda: check_placement(placement, prompt),
        "plan the prefill": lambda: prefill(prompt, ring),
        "check the plan": lambda: check_plan(snapshot, plan),
        "all of these": everything,
        "check a placement of chunks": lambda: check_placement(mixed, prompt),
    }
    results = {}
    for name, run in rows.items():
        times = seconds_of(run, num_repeats)
        results[name] = {"median": median(times), "p99": times[len(times) * 99 // 100]}
    return results


def print_table(num_tokens: int, num_instances: int, rows: dict[str, dict[str, float]]) -> None:
    print(
        f"a prompt of {num_tokens:,} tokens over {num_instances} instances; ceiling {CEILING * 1e6:.0f} us\n"
    )
    print(f"{'':<28} {'median us':>10} {'p99 us':>10}")
    for name, row in rows.items():
        print(f"{name:<28} {row['median'] * 1e6:>10.1f} {row['p99'] * 1e6:>10.1f}")


def main() -> None:
    parser = script_parser("placement", __doc__)
    parser.add_argument(
        "--num-tokens", type=int, default=2_000_000, help="length of the prompt in tokens (%(default)s)"
    )
    parser.add_argument(
        "--num-instances", type=int, default=8, help="number of instances in the group (%(default)s)"
    )
    parser.add_argument(
        "--num-repeats", type=int, default=2000, help="number of runs of each row (%(default)s)"
    )
    arguments = parser.parse_args()
    rows = measure(arguments.num_tokens, arguments.num_instances, arguments.num_repeats)
    print_table(arguments.num_tokens, arguments.num_instances, rows)
    numbers = {
        "num_tokens": arguments.num_tokens,
        "num_instances": arguments.num_instances,
        "num_repeats": arguments.num_repeats,
        "ceiling": CEILING,
        "is_below_ceiling": rows["all of these"]["median"] < CEILING,
        "rows": rows,
    }
    print_result("placement", numbers, save=arguments.save)


if __name__ == "__main__":
    main()
