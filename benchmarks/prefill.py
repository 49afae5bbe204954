"""How long does one GPU take for a prompt?

From the batch's arrival at its worker to its first token, with dummy weights and random tokens, whole and
in chunks, beside the floor: the operations of the layers and of causal attention over the rate of a large
matrix product (790 TFLOP/s).
"""

import argparse
from os import getloadavg
from statistics import median

import torch
from one_gpu import OneGpu
from result import print_result

LENGTHS = (1024, 8192, 32768, 131072)
CHUNKS = (8192, 32768)
NUM_SECONDS = 3.0  # of each length, but at least 3 runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", help="a built-in shape (%(default)s)")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens (%(default)s)")
    parser.add_argument("--chunks", type=int, nargs="*", default=CHUNKS, help="tokens (%(default)s)")
    parser.add_argument("--save", action="store_true", help="append the result to results/prefill.jsonl")
    args = parser.parse_args()
    load_before = getloadavg()[0]
    gpu = OneGpu(args.model, num_slots=max(args.lengths))
    print(f"started in {gpu.seconds_to_start:.1f} s")
    print(f"{'tokens':>8} {'chunk':>8} {'ms':>10} {'floor ms':>10} {'of floor':>9}")
    rows = []
    for length in args.lengths:
        for chunk in (length, *(chunk for chunk in args.chunks if chunk < length)):
            first = gpu.prefill(length, chunk)
            num_runs = max(3, int(NUM_SECONDS / first))
            seconds = median(gpu.prefill(length, chunk) for _ in range(num_runs))
            floor = gpu.floors.prefill(length)
            rows.append(
                {"tokens": length, "chunk": chunk, "seconds": seconds, "first": first, "floor": floor}
            )
            print(
                f"{length:>8} {chunk:>8} {seconds * 1e3:>10.1f} {floor * 1e3:>10.1f} {floor / seconds:>9.0%}"
            )
    numbers = {"model": args.model, "torch": torch.__version__, "rows": rows}
    print_result("prefill", load_before, numbers, save=args.save)


if __name__ == "__main__":
    main()
