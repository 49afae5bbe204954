"""Measures one round of batching: the exact program by numbers of requests and units, with its wrapper.

Ceilings on one core: 150 us for 64 requests on 8 units, 3 ms for 256. It also measures compiling it, loading
it compiled, and adding one request to the future KV of 256. With --check, it also solves that many random
programs by trying every possibility.
"""

import sys
from collections.abc import Callable
from math import inf, isclose
from os import environ
from pathlib import Path
from random import Random
from statistics import median
from subprocess import run
from tempfile import TemporaryDirectory
from time import perf_counter

sys.path.append(str(Path(__file__).parents[1] / "support"))

from result import print_result, script_parser

from loong.core.cost.cost_model import PrefillTerms
from loong.core.placement import Placement
from loong.core.request import RequestView
from loong.scheduler.common.future_kv import FutureKV, paper_weight
from loong.scheduler.common.request_lengths import Lengths
from loong.scheduler.cost.cost_model import WorkCostModel
from loong.scheduler.paper.batching_program import Demand, Offer, solve

NUM_REQUESTS = (16, 64, 128, 256, 512)
NUM_UNITS = (2, 4, 8, 16)
CEILINGS = {(64, 8): 150e-6, (256, 8): 3e-3}
START = """
from time import perf_counter
from loong.scheduler.paper.batching_program import warm_up
start = perf_counter()
warm_up()
print(perf_counter() - start)
"""


def round_of_batching(
    random: Random, num_requests: int, num_units: int
) -> tuple[list[Demand], list[Offer], list[PrefillTerms]]:
    """Return prompts of 64 to 100,000 tokens, and units with room for twice of all."""
    lengths = sorted((int(64 * 1562 ** random.random()) for _ in range(num_requests)), reverse=True)
    demands = [Demand(n, n, n * n, paper_weight(n)) for n in lengths]
    offers = [Offer(1, 2 * sum(lengths) // num_units) for _ in range(num_units)]
    return demands, offers, [WorkCostModel().prefill_terms(dop) for dop in range(1, num_units + 1)]


def seconds_of(work: Callable[[], object], num_repeats: int = 200) -> float:
    """Return the median, after a first call that does not count."""
    work()
    times = []
    for _ in range(num_repeats):
        start = perf_counter()
        work()
        times.append(perf_counter() - start)
    return median(times)


def measure(num_requests: int, num_units: int) -> float:
    demands, offers, terms = round_of_batching(Random(0), num_requests, num_units)
    return seconds_of(lambda: solve(demands, offers, terms))


def measure_future_kv(num_running: int = 256) -> float:
    random = Random(0)
    lengths = [(random.randint(64, 10_000), random.randint(1, 500)) for _ in range(num_running)]
    future = FutureKV.of(Lengths.of([waiting_view(*length) for length in lengths]))
    return seconds_of(lambda: future.adding(waiting_view(1000, 250)).peak)


def waiting_view(num_prompt_tokens: int, max_tokens: int) -> RequestView:
    return RequestView("r", num_prompt_tokens, 0, max_tokens, 0.0, None, Placement())


def measure_starts() -> tuple[float, float]:
    """Return the seconds of `warm_up` in a process that finds nothing compiled, and in the next one."""
    with TemporaryDirectory() as folder:
        command, environment = [sys.executable, "-c", START], {**environ, "NUMBA_CACHE_DIR": folder}
        starts = [run(command, env=environment, check=True, capture_output=True) for _ in range(2)]
    compiling, loading = (float(start.stdout) for start in starts)
    return compiling, loading


def num_least(num_programs: int) -> int:
    """Return how many random programs have the least cost of all possibilities, or have none at all."""
    sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))
    from small_programs import least_cost_of_all, random_program

    random, num_equal = Random(0), 0
    for _ in range(num_programs):
        program = random_program(random, max_demands=7, max_offers=4)
        solution = solve(*program)
        num_equal += isclose(solution.cost if solution else inf, least_cost_of_all(program), abs_tol=1e-12)
    return num_equal


def print_table(seconds: dict[tuple[int, int], float]) -> None:
    print("us a round, median (ceiling)\n")
    print(f"{'requests':>8}" + "".join(f"{f'{m} units':>16}" for m in NUM_UNITS))
    for n in NUM_REQUESTS:
        cells = []
        for m in NUM_UNITS:
            ceiling = f" ({1e6 * CEILINGS[n, m]:.0f})" if (n, m) in CEILINGS else ""
            cells.append(f"{1e6 * seconds[n, m]:.0f}{ceiling}")
        print(f"{n:>8}" + "".join(f"{cell:>16}" for cell in cells))


def main() -> None:
    parser = script_parser("program", __doc__)
    parser.add_argument(
        "--check", type=int, default=0, metavar="N", help="number of random programs to check (%(default)s)"
    )
    arguments = parser.parse_args()
    seconds = {(n, m): measure(n, m) for n in NUM_REQUESTS for m in NUM_UNITS}
    print_table(seconds)
    compiling, loading = measure_starts()
    adding = measure_future_kv()
    print(f"\nto compile {compiling:.2f} s, to load {loading:.2f} s")
    print(f"to add one to the future KV of 256 {1e6 * adding:.1f} us")
    num_equal = num_least(arguments.check)
    if arguments.check:
        print(f"{num_equal} of {arguments.check} random programs: the same as the best of all ways")
    numbers = {
        "rows": [{"num_requests": n, "num_units": m, "median": t} for (n, m), t in seconds.items()],
        "ceilings": [{"num_requests": n, "num_units": m, "seconds": t} for (n, m), t in CEILINGS.items()],
        "is_below_ceilings": all(seconds[cell] < ceiling for cell, ceiling in CEILINGS.items()),
        "compile": compiling,
        "load": loading,
        "add_to_future_kv": adding,
        "num_checked": arguments.check,
        "num_equal": num_equal,
    }
    print_result("program", numbers, save=arguments.save)


if __name__ == "__main__":
    main()
