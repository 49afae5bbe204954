"""How long does a decode step take on one GPU?

The median time between the tokens of a lease, as its worker reports them, with dummy weights, beside the
floor: the bytes of the weights and of all KV over the rate at which they can be read (4.3 TB/s).
"""

import argparse
from os import getloadavg
from statistics import median

import torch
from one_gpu import OneGpu
from result import print_result

CASES = ("1x1024", "32x1024", "128x1024", "256x1024", "32x4096", "1x131072")
NUM_STEPS = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", help="a built-in shape (%(default)s)")
    parser.add_argument("--cases", nargs="+", default=CASES, help="requests x context (%(default)s)")
    parser.add_argument("--save", action="store_true", help="append the result to results/decode.jsonl")
    args = parser.parse_args()
    load_before = getloadavg()[0]
    cases = [tuple(map(int, case.split("x"))) for case in args.cases]
    num_slots = max(num_requests * (context + NUM_STEPS) for num_requests, context in cases)
    gpu = OneGpu(args.model, num_slots)
    print(f"started in {gpu.seconds_to_start:.1f} s")
    print(f"{'requests x context':>20} {'ms':>8} {'worst ms':>9} {'floor ms':>9} {'of floor':>9}")
    rows = {}
    for case, (num_requests, context) in zip(args.cases, cases, strict=True):
        gpu.decode(num_requests, context, NUM_STEPS)
        steps = gpu.decode(num_requests, context, NUM_STEPS)
        floor = gpu.floors.decode(num_requests, context)
        seconds = median(steps)
        rows[case] = {"seconds": seconds, "worst": max(steps), "floor": floor}
        shown = f"{seconds * 1e3:>8.2f} {max(steps) * 1e3:>9.2f} {floor * 1e3:>9.2f} {floor / seconds:>9.0%}"
        print(f"{case:>20} {shown}")
    numbers = {"model": args.model, "torch": torch.__version__, "rows": rows}
    print_result("decode", load_before, numbers, save=args.save)


if __name__ == "__main__":
    main()
