"""Measures prompts and decodes on a group of two GPUs, by the links between them.

The GPUs are of one host and write into each other's memory, or count as two hosts and exchange by NCCL: over
NVLink where there is some, or over sockets of the loopback interface. A network lies in between. It reports
the median time of a prompt, striped over both GPUs, and of a decode step with both as masters.

    python benchmarks/gpu/links.py --links memory nccl sockets
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch

sys.path.append(str(Path(__file__).parents[1] / "support"))

from decode import group_steps, parse_case
from gpu_group import LINKS, GpuGroup, GpuInstance, Requests
from prefill import group_prefill
from result import print_result, script_parser

from loong.core.placement import InstanceId

GROUP: tuple[InstanceId, ...] = (0, 1)
PROMPTS = (8192, 32768)
DECODES = ("1x1024", "32x1024")
NUM_SLOTS = 65536


def measure(
    model: str, links: str, prompts: Sequence[int], decodes: Sequence[str]
) -> list[dict[str, object]]:
    """Return the rows of all cases, printed as they come."""
    gpus = GpuGroup(model, len(GROUP), NUM_SLOTS, links)
    print(f"{links}: started in {gpus.seconds_to_start:.1f} s", flush=True)
    rows: list[dict[str, object]] = []

    def report(case: str, seconds: float) -> None:
        print(f"{links:>8} {case:>16} {seconds * 1e3:>9.2f} ms", flush=True)
        rows.append({"links": links, "case": case, "seconds": seconds})

    for length in prompts:
        report(f"prompt {length}", group_prefill(gpus, length, len(GROUP), len(GROUP), length))
    for case in decodes:
        requests = Requests(*parse_case(case), GROUP)
        gpus.each(partial(GpuInstance.hold, requests=requests))
        report(f"decode {case}", median(group_steps(gpus, requests, min(requests.number, len(GROUP)))))
        gpus.each(partial(GpuInstance.forget, requests=requests))
    gpus.close()
    return rows


def main() -> None:
    parser = script_parser("links", __doc__)
    parser.add_argument("--model", default="llama-3.1-8b", help="built-in shape of the model (%(default)s)")
    parser.add_argument(
        "--links", nargs="+", choices=LINKS, default=LINKS, help="links to measure (%(default)s)"
    )
    parser.add_argument(
        "--prompts", nargs="+", type=int, default=PROMPTS, help="lengths of prompts, in tokens (%(default)s)"
    )
    parser.add_argument(
        "--decodes", nargs="+", default=DECODES, help="decodes, each REQUESTSxCONTEXT (%(default)s)"
    )
    args = parser.parse_args()
    rows = [row for links in args.links for row in measure(args.model, links, args.prompts, args.decodes)]
    numbers = {"model": args.model, "gpu": torch.cuda.get_device_name(), "rows": rows}
    print_result("links", numbers, save=args.save)


if __name__ == "__main__":
    main()
