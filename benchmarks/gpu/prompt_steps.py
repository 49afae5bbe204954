"""Measures a step with a prompt on one GPU, the host's part of it, and the roofline's prediction.

Steps have a prompt or a chunk after its history, alone and with decodes of context 1,024, with dummy weights.
It reports the median time from the batch's arrival at its worker to its tokens. It also reports the
prediction of an H200's roofline without the time to send a batch. A trace adds the time that the GPU works in
a step, and the number of driver calls. Time above the GPU's work is the host's. `--launched`: without
captured steps. Ceiling: 2 ms above the GPU's work.
"""

import cProfile
import pstats
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch

sys.path.append(str(Path(__file__).parents[1] / "support"))

from one_gpu import OneGpu, PromptStep
from result import print_result, script_parser
from torch.profiler import ProfilerActivity, profile

from loong.hardware.devices import DEVICES
from loong.hardware.model_shape import shape_of
from loong.model.shapes import find_config
from loong.scheduler.cost.roofline import roofline

CASES = ("20", "256", "1024", "20+32", "512+64")
CALLS = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpy", "cudaMemset")  # names begin with these
CONTEXT = 1024
NUM_SLOTS = 131072
LEAST_RUNS, MOST_RUNS, SECONDS = 3, 20, 1.0
NUM_PROFILED = 10
WIDTH = 13  # of a column

Step = Callable[[], float]


def cases(given: Sequence[str]) -> Iterator[PromptStep]:
    """Yield the cases of the command line."""
    for case in given:
        prompt, _, num_decodes = case.partition("+")
        num_tokens, _, num_cached = prompt.partition("@")
        yield PromptStep(int(num_tokens), int(num_cached or 0), int(num_decodes or 0), CONTEXT)


def measure(
    model: str, given: Sequence[str], num_functions: int, num_kernels: int, *, is_captured: bool
) -> list[dict[str, object]]:
    """Measure all cases."""
    before = torch.cuda.mem_get_info()[0]
    gpu = OneGpu(model, NUM_SLOTS, is_captured=is_captured)
    gib = (before - torch.cuda.mem_get_info()[0]) / 2**30
    print(f"started in {gpu.seconds_to_start:.1f} s, {gib:.2f} GiB with weights and KV of 131,072 tokens")
    names = "prompt", "behind", "decodes", "ms", "roofline", "GPU works ms", "calls"
    print("".join(f"{name:>{WIDTH}}" for name in names))
    cost_model = roofline(shape_of(find_config(model, "dummy")), DEVICES["h200"])
    rows: list[dict[str, object]] = [{"start_seconds": gpu.seconds_to_start, "gib": gib}]
    for case in cases(given):
        step, predicted = partial(gpu.run_prompt, case), cost_model.step_time(gpu.work_of(case))
        warm = min(step() for _ in range(3))
        num_runs = max(LEAST_RUNS, min(MOST_RUNS, int(SECONDS / warm)))
        seconds = median(step() for _ in range(num_runs))
        busy, calls, kernels = traced(step)
        row = {"prompt": case.num_tokens, "cached": case.num_cached, "decodes": case.num_decodes}
        times = {"seconds": seconds, "predicted_seconds": predicted, "busy_seconds": busy}
        rows.append({**row, **times, "calls": dict(calls)})
        shown = [*row.values(), *(f"{time * 1e3:.2f}" for time in times.values()), calls.total()]
        print("".join(f"{value:>{WIDTH}}" for value in shown), dict(calls.most_common()))
        for name, (count, microseconds) in kernels[:num_kernels]:
            print(f"{count:>16} x {microseconds / count:>8.1f} us  {name[:80]}")
        if num_functions:
            print_functions(step, num_functions)
    return rows


def traced(step: Step) -> tuple[float, Counter[str], list[tuple[str, tuple[int, float]]]]:
    """Return the GPU's seconds in a step, the host's calls by name, and kernels: number and us in total."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]):
        step()  # the first trace takes long to begin
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        step()
    calls, kernels = Counter[str](), dict[str, tuple[int, float]]()
    busy = end = 0.0
    for event in sorted(trace.events(), key=lambda event: event.time_range.start):
        times = event.time_range
        if event.device_type.name == "CUDA":  # a kernel that begins early waits for the one before it
            own = max(0.0, times.end - max(times.start, end))
            busy += own * 1e-6
            end = max(end, times.end)
            count, total = kernels.get(event.name, (0, 0.0))
            kernels[event.name] = (count + 1, total + own)
        elif event.name.startswith(CALLS):
            calls[event.name] += 1
    return busy, calls, sorted(kernels.items(), key=lambda item: -item[1][1])


def print_functions(step: Step, num_functions: int) -> None:
    """Print where the host's time goes, by function."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(NUM_PROFILED):
        step()
    profiler.disable()
    pstats.Stats(profiler).strip_dirs().sort_stats("tottime").print_stats(num_functions)


def main() -> None:
    parser = script_parser("prompt_steps", __doc__)
    parser.add_argument("--model", default="llama-3.1-8b", help="built-in shape of the model (%(default)s)")
    parser.add_argument(
        "--cases",
        nargs="+",
        default=CASES,
        help="cases to measure, each PROMPT[@HISTORY][+DECODES] (%(default)s)",
    )
    parser.add_argument("--launched", action="store_true", help="let the host launch every kernel")
    parser.add_argument(
        "--kernels", type=int, default=0, help="number of kernels to show for each case (%(default)s)"
    )
    parser.add_argument(
        "--functions",
        type=int,
        default=0,
        help="number of the host's functions to show for each case (%(default)s)",
    )
    args = parser.parse_args()
    is_captured = not args.launched
    rows = measure(args.model, args.cases, args.functions, args.kernels, is_captured=is_captured)
    numbers = {"model": args.model, "torch": torch.__version__, "is_captured": is_captured}
    print_result("prompt_steps", {**numbers, "rows": rows}, save=args.save)


if __name__ == "__main__":
    main()
