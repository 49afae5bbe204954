"""What does the host pay for a step with a prompt, on one GPU?

Steps of a prompt alone, and beside decodes whose context is 1,024, with dummy weights: the median time from
the batch's arrival at its worker to its tokens, beside how long the GPU works in one such step and how many
calls of the driver the host makes for it, from a trace. What is above the GPU's work is the host's.
`--functions` shows where in Python that goes. Ceiling: 2 ms above the GPU's work.
"""

import cProfile
import pstats
from collections import Counter
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from one_gpu import OneGpu
from result import print_result, script_parser
from torch.profiler import ProfilerActivity, profile

CASES = ("20", "256", "1024", "20+32", "512+64")
CALLS = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpy", "cudaMemset")  # names begin with these
CONTEXT = 1024
NUM_RUNS = 20
NUM_PROFILED = 10

Step = Callable[[], float]


def traced(step: Step) -> tuple[float, Counter[str]]:
    """Seconds that the GPU works in a step, and the calls that launch or copy, by name."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        step()
    calls = Counter[str]()
    busy = end = 0.0
    for event in sorted(trace.events(), key=lambda event: event.time_range.start):
        times = event.time_range
        if event.device_type.name == "CUDA":  # a kernel that begins early waits for the one before it
            busy += max(0.0, times.end - max(times.start, end)) * 1e-6
            end = max(end, times.end)
        elif event.name.startswith(CALLS):
            calls[event.name] += 1
    return busy, calls


def print_functions(step: Step, num_functions: int) -> None:
    """Where the host's time goes, by function."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(NUM_PROFILED):
        step()
    profiler.disable()
    pstats.Stats(profiler).strip_dirs().sort_stats("tottime").print_stats(num_functions)


def main() -> None:
    parser = script_parser("prompt_steps", __doc__)
    parser.add_argument("--model", default="llama-3.1-8b", help="a built-in shape (%(default)s)")
    parser.add_argument("--cases", nargs="+", default=CASES, help="PROMPT or PROMPT+DECODES (%(default)s)")
    parser.add_argument("--functions", type=int, default=0, help="show so many for each case (%(default)s)")
    args = parser.parse_args()
    before = torch.cuda.mem_get_info()[0]
    gpu = OneGpu(args.model, num_slots=131072)
    gib = (before - torch.cuda.mem_get_info()[0]) / 2**30
    print(f"started in {gpu.seconds_to_start:.1f} s, {gib:.2f} GiB with weights and KV of 131,072 tokens")
    print(f"{'prompt':>7} {'decodes':>8} {'ms':>8} {'GPU works ms':>13} {'calls':>6}")
    rows = []
    for case in args.cases:
        num_tokens, _, num_decodes = case.partition("+")
        step = partial(gpu.prompt_beside_decodes, int(num_tokens), int(num_decodes or 0), CONTEXT)
        for _ in range(3):
            step()
        seconds = median(step() for _ in range(NUM_RUNS))
        busy, calls = traced(step)
        row = {"prompt": int(num_tokens), "decodes": int(num_decodes or 0), "seconds": seconds}
        rows.append({**row, "busy_seconds": busy, "calls": dict(calls)})
        shown = f"{seconds * 1e3:>8.2f} {busy * 1e3:>13.2f} {calls.total():>6}"
        print(f"{row['prompt']:>7} {row['decodes']:>8} {shown}  {dict(calls.most_common())}")
        if args.functions:
            print_functions(step, args.functions)
    numbers = {"model": args.model, "torch": torch.__version__, "start_seconds": gpu.seconds_to_start}
    print_result("prompt_steps", {**numbers, "gib": gib, "rows": rows}, save=args.save)


if __name__ == "__main__":
    main()
