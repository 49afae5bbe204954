"""The mix of devices that `loong plan` chooses for three workloads, confirmed in virtual time.

Both count with the same rates of devices. Compared are the best unit of one computing device with memory
devices, and that device alone. Simulated are as many requests as two of their batches, prompts included,
which arrive all at once: with `replicas`, or the better of `lamina` and `lamina-by-request`. Printed are
tokens of answers a second and price, predicted and simulated. Needs no device.

    python benchmarks/evaluation/planned_mixes.py    # some minutes
"""

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))

from goodput_cells import Cell
from result import print_result, script_parser

from loong.hardware.device_mix import Demand, Offer, OfferedDevice, offers
from loong.hardware.devices import DEVICES
from loong.hardware.model_shape import shape_of
from loong.model.shapes import find_config
from loong.simulation.cluster import Hardware
from loong.simulation.points import asked_of, run_point
from loong.workloads.report.report import table
from loong.workloads.workload import endless_workload

WORKLOADS = ("fixed(2000,1000)", "fixed(8000,400)", "fixed(8000,30)")
COMPUTING, MEMORY = "h100", "rtx-4090"
PRICES = {"h100": 36_500.0, "rtx-4090": 1_600.0}  # dollars: Lamina's table 1, and a list price
POLICIES = ("lamina", "lamina-by-request")
AT_ONCE = 1e6  # requests a second
NUM_BATCHES = 2


@dataclass(frozen=True, slots=True)
class Confirmed:
    """A unit: tokens of answers a second and 1,000 of its price, as planned and as simulated."""

    workload: str
    unit: str
    has_memory: bool
    batch: int
    planned: float
    simulated: float


def offered(name: str, *, computes: bool) -> OfferedDevice:
    """Return a device with the rates by which it is simulated."""
    rates = DEVICES[name]
    return OfferedDevice(
        name,
        PRICES[name],
        rates.memory_bytes,
        rates.memory_bandwidth,
        rates.linear_flops if computes else 0.0,
        rates.link_bandwidth,
        rates.exchange_delay / 2,
        rates.link_bandwidth,
        rates.all_reduce_delay / 2,
    )


def demand_of(workload: str, num_drawn: int, tpot: float) -> Demand:
    """Return the mean lengths of a workload."""
    drawn = list(islice(endless_workload(workload, seed=0), num_drawn))
    num_prompt = sum(r.num_prompt_tokens for r in drawn) / num_drawn
    return Demand(num_prompt, sum(r.num_output_tokens for r in drawn) / num_drawn, tpot)


def candidates(args: argparse.Namespace, workload: str) -> Iterator[Offer]:
    """Yield the best units with memory devices, and alone."""
    shape = shape_of(find_config(args.model, "dummy"))
    devices = [offered(COMPUTING, computes=True), offered(MEMORY, computes=False)]
    demand = demand_of(workload, 1000, args.tpot)
    found = offers(shape, demand, devices, args.most_memory_devices)
    one = [offer for offer in found if offer.mix.num_computing == 1]
    yield next(o for o in one if o.mix.memory is not None and o.mix.memory.name == MEMORY)
    yield next(o for o in one if o.mix.memory is None)


def simulated(args: argparse.Namespace, workload: str, offer: Offer, policy: str) -> float:
    """Return the tokens of answers a second of a unit, of requests that all arrive at once."""
    mix, num_requests = offer.mix, NUM_BATCHES * offer.batch_size
    cell = Cell(workload, "tight", policy, 0, args.model, COMPUTING, 1, 1, num_requests, 0.1)
    hardware = Hardware(
        shape_of(find_config(args.model, "dummy")),
        COMPUTING,
        1,
        memory_instances=mix.num_memory,
        memory_device=mix.memory.name if mix.memory else None,
    )
    config = replace(cell.config(), is_per_class=False, hardware=hardware)
    config = replace(config, policy=replace(config.policy, max_micro_batches=mix.num_micro_batches))
    point = run_point(config, asked_of(config, policy, config.rules[0], AT_ONCE))
    return point.metrics.output_throughput


def confirmed(args: argparse.Namespace) -> Iterator[Confirmed]:
    """Yield all candidates of all workloads, the best planned first."""
    for workload in args.workload:
        for offer in sorted(candidates(args, workload), key=lambda o: -o.rate_per_price):
            scale, policies = 1000 / offer.mix.price, POLICIES if offer.mix.memory else ("replicas",)
            yield Confirmed(
                workload,
                str(offer.mix),
                offer.mix.memory is not None,
                offer.batch_size,
                offer.output_rate * scale,
                max(simulated(args, workload, offer, policy) for policy in policies) * scale,
            )


def agrees(found: Sequence[Confirmed]) -> bool:
    """Return whether the best planned kind of unit is the best simulated one."""
    planned, simulated = max(found, key=lambda c: c.planned), max(found, key=lambda c: c.simulated)
    return planned.has_memory == simulated.has_memory


def main() -> None:
    parser = script_parser("planned_mixes", __doc__)
    parser.add_argument("--model", default="llama-2-7b", help="model (%(default)s)")
    parser.add_argument("--workload", nargs="+", default=WORKLOADS, help="workloads (three)")
    parser.add_argument("--tpot", type=float, default=0.1, help="seconds a token at most (%(default)s)")
    parser.add_argument("--most-memory-devices", type=int, default=16, help="in a unit (%(default)s)")
    args = parser.parse_args()
    found = list(confirmed(args))
    titles = ("workload", "unit", "batch", "planned", "simulated", "simulated / planned")
    rows = [
        (
            c.workload,
            c.unit,
            f"{c.batch:,}",
            f"{c.planned:.1f}",
            f"{c.simulated:.1f}",
            f"{c.simulated / c.planned:.2f}",
        )
        for c in found
    ]
    print(table(titles, rows))
    for workload in args.workload:
        is_same = agrees([c for c in found if c.workload == workload])
        print(f"{workload}: {'the same' if is_same else 'another'} kind of unit is best in simulation")
    numbers = {"command": shlex.join(["python", *sys.argv]), "units": [asdict(c) for c in found]}
    print_result("planned_mixes", numbers, save=args.save)


if __name__ == "__main__":
    main()
