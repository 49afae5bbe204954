"""Measures a decode step on one GPU, or on a group of them.

It reports the median time between the tokens of a lease, from the workers' reports, with dummy weights. The
floor is the bytes of the weights and of each instance's part of all KV over the read bandwidth (4.3 TB/s).
With `--dop`, every request's KV is spread evenly over the group, and the two exchanges of a layer are also
timed separately.
"""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

sys.path.append(str(Path(__file__).parents[1] / "support"))

from gpu_group import GpuGroup, GpuInstance, Requests
from one_gpu import Floors, OneGpu
from result import print_result, script_parser

from loong.kernels import Partial
from loong.model.shapes import find_config

CASES = ("1x1024", "32x1024", "128x1024", "256x1024", "32x4096", "1x131072")
NUM_STEPS = 100
EXCHANGED_TOKENS = (1, 16, 64)
NUM_REPLAYS = 20  # of a graph of exchanges
HEADER = (
    f"{'requests x context':>20} {'masters':>7} {'ms':>8} {'worst ms':>9} {'floor ms':>9} {'of floor':>9}"
)


def parse_case(case: str) -> tuple[int, int]:
    num_requests, context = map(int, case.split("x"))
    return num_requests, context


def summary(case: str, num_masters: int, steps: Sequence[float], floor: float) -> dict[str, object]:
    """Print the times of a case's steps, and return them."""
    seconds, worst = median(steps), max(steps)
    shown = f"{seconds * 1e3:>8.2f} {worst * 1e3:>9.2f} {floor * 1e3:>9.2f} {floor / seconds:>9.0%}"
    print(f"{case:>20} {num_masters:>7} {shown}")
    return {"case": case, "masters": num_masters, "seconds": seconds, "worst": worst, "floor": floor}


def measure_one(model: str, cases: Sequence[str]) -> Mapping[str, object]:
    """Measure all cases on one GPU."""
    sizes = {case: parse_case(case) for case in cases}
    num_slots = max(num_requests * (context + NUM_STEPS) for num_requests, context in sizes.values())
    gpu = OneGpu(model, num_slots)
    print(f"started in {gpu.seconds_to_start:.1f} s\n{HEADER}")
    rows = []
    for case, size in sizes.items():
        gpu.decode(*size, NUM_STEPS)
        rows.append(summary(case, 1, gpu.decode(*size, NUM_STEPS), gpu.floors.decode(*size)))
    return {"rows": rows}


def measure_group(model: str, dop: int, cases: Sequence[str], masters: Sequence[int]) -> Mapping[str, object]:
    """Measure all cases on a group, with each number of masters."""
    sizes = {case: parse_case(case) for case in cases}
    num_slots = max(n * (-(-context // dop) + 1 + NUM_STEPS) for n, context in sizes.values())
    group, floors = GpuGroup(model, dop, num_slots), Floors.of(find_config(model, "dummy"))
    print(f"started in {group.seconds_to_start:.1f} s\n{HEADER}")
    rows = []
    for case, (num_requests, context) in sizes.items():
        requests = Requests(num_requests, context, tuple(range(dop)))
        group.each(partial(GpuInstance.hold, requests=requests))
        floor = floors.decode(num_requests, context, dop)
        for num_masters in masters:
            if num_masters <= min(num_requests, dop):
                steps = group_steps(group, requests, num_masters)
                rows.append(summary(case, num_masters, steps, floor))
        group.each(partial(GpuInstance.forget, requests=requests))
    return {"rows": rows, "exchanges": measure_exchanges(group, dop)}


def group_steps(group: GpuGroup, requests: Requests, num_masters: int) -> list[float]:
    """Return the seconds between the tokens of the first master, in the second of two leases."""
    leases = [
        requests.lease(group.next_id(), requests.held_on, range(num_masters), NUM_STEPS) for _ in range(2)
    ]
    (_, ran), *_ = group.each(partial(GpuInstance.run, commands=leases))
    return [later - earlier for earlier, later in pairwise(ran.reported_at)]


def measure_exchanges(group: GpuGroup, dop: int) -> list[dict[str, float]]:
    """Measure both exchanges of a layer, without any attention."""
    print(f"{'tokens a master':>20} {'us for two exchanges':>21}")
    rows = []
    for num_tokens in EXCHANGED_TOKENS:
        job = partial(exchange_time, batch_id=group.next_id(), num_tokens=num_tokens, dop=dop)
        seconds = max(group.each(job))
        print(f"{num_tokens:>20} {seconds * 1e6:>21.1f}")
        rows.append({"tokens_a_master": num_tokens, "seconds": seconds})
    return rows


def exchange_time(instance: GpuInstance, batch_id: int, num_tokens: int, dop: int) -> float:
    """Return the seconds of a layer's two exchanges in a captured graph of many; all are masters."""
    exchange, config = instance.backend.exchange, instance.config
    assert exchange is not None
    device = instance.backend.device.torch_device
    shape = (num_tokens, config.num_heads, config.head_dim)
    q = torch.randn(shape, device=device).to(config.torch_dtype)
    parts = Partial(q.repeat(dop, 1, 1), torch.zeros(dop * num_tokens, config.num_heads, device=device))

    def exchanges() -> None:
        for layer in range(config.num_layers):
            exchange.gather(layer, q)
            exchange.merge(layer, parts)

    with instance.fabric.batch(batch_id, tuple(range(dop))):
        exchange.begin(dict.fromkeys(range(dop), num_tokens))
        replay = instance.backend.capture(exchanges)
        events = [_event() for _ in range(NUM_REPLAYS + 1)]
        for event in events:
            event.record()
            replay()
        torch.cuda.synchronize()
    times: list[float] = [earlier.elapsed_time(later) for earlier, later in pairwise(events)]
    return median(times) * 1e-3 / config.num_layers


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own


def main() -> None:
    parser = script_parser("decode", __doc__)
    parser.add_argument("--model", default="llama-3.1-8b", help="built-in shape of the model (%(default)s)")
    parser.add_argument(
        "--cases", nargs="+", default=CASES, help="cases to measure, each REQUESTSxCONTEXT (%(default)s)"
    )
    parser.add_argument("--dop", type=int, default=1, help="number of GPUs in the group (%(default)s)")
    parser.add_argument(
        "--masters", type=int, nargs="+", default=[1], help="numbers of masters in the group (%(default)s)"
    )
    args = parser.parse_args()
    if args.dop == 1:
        measured = measure_one(args.model, args.cases)
    else:
        measured = measure_group(args.model, args.dop, args.cases, args.masters)
    numbers = {"model": args.model, "torch": torch.__version__, "dop": args.dop, **measured}
    print_result("decode", numbers, save=args.save)


if __name__ == "__main__":
    main()
