"""Measures a prompt on one GPU, or on a group of them.

It reports the time from the batch's arrival at its worker to its first token, with dummy weights and random
tokens, whole and in chunks. The floor is the operations of the layers and of causal attention over the rate
of a large matrix product (790 TFLOP/s). With `--dop`, one prompt is striped over each number of GPUs. Its KV
stays where it is made or, in another row, all on the first GPU (retention), whole and in chunks. The ring's
efficiency is one GPU's time over the total time of the group's GPUs.
"""

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch

sys.path.append(str(Path(__file__).parents[1] / "support"))

from gpu_group import GpuGroup, GpuInstance
from one_gpu import FLOPS_PER_SECOND, PARAMS, Floors, OneGpu
from result import print_result, script_parser

from loong.core.instance import ESPGroup
from loong.core.instructions import RequestInput, RunBatch
from loong.core.placement import KVSegment, Placement
from loong.core.plan import BatchPlan, QueryBlock, Transfer
from loong.core.positions import stripe
from loong.model.shapes import find_config

LENGTHS = (1024, 8192, 32768, 131072)
CHUNKS = (8192, 32768)
NUM_SECONDS = 3.0  # of each length, but at least 3 runs
MAX_TOKENS = 131072  # of a step on one GPU: beyond, activations need the memory
LONG_SECONDS = 8.0  # a run that takes longer is not repeated


def measure_one(model: str, lengths: Sequence[int], chunks: Sequence[int]) -> list[dict[str, float]]:
    """Measure all lengths on one GPU."""
    gpu = OneGpu(model, num_slots=max(lengths))
    print(f"started in {gpu.seconds_to_start:.1f} s")
    print(f"{'tokens':>8} {'chunk':>8} {'ms':>10} {'floor ms':>10} {'of floor':>9}")
    rows: list[dict[str, float]] = []
    for length in lengths:
        for chunk in (length, *(chunk for chunk in chunks if chunk < length)):
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
    return rows


def measure_groups(
    model: str, lengths: Sequence[int], dops: Sequence[int], chunks: Sequence[int]
) -> list[dict[str, float]]:
    """Measure all lengths on groups of each size that has room for them."""
    num_slots = max(MAX_TOKENS, -(-max(lengths) // max(dops)))
    group, floors = GpuGroup(model, max(dops), num_slots), Floors.of(find_config(model, "dummy"))
    print(f"started in {group.seconds_to_start:.1f} s")
    print(
        f"{'tokens':>8} {'chunk':>8} {'DoP':>4} {'kept on':>8} {'ms':>10} {'floor ms':>10} {'of floor':>9}",
        end=" ",
    )
    print(f"{'TFLOP/s a GPU':>14} {'efficiency':>11}")
    rows, alone = [], dict[int, float]()
    for length in lengths:
        for dop, num_homes, chunk in group_cases(length, dops, chunks, num_slots):
            seconds, floor = group_prefill(group, length, dop, num_homes, chunk), floors.prefill(length) / dop
            if dop == 1 and chunk == length:
                alone[length] = seconds
            efficiency = alone.get(length, float("nan")) / (dop * seconds)
            row = {"tokens": length, "chunk": chunk, "dop": dop, "homes": num_homes}
            rows.append({**row, "seconds": seconds, "floor": floor})
            rate = floors.prefill(length) * FLOPS_PER_SECOND / seconds / dop
            shown = f"{seconds * 1e3:>10.1f} {floor * 1e3:>10.1f} {floor / seconds:>9.0%}"
            shown += f" {rate / 1e12:>14.0f} {efficiency:>11.0%}"
            print(f"{length:>8} {chunk:>8} {dop:>4} {num_homes:>8} {shown}", flush=True)
    return rows


def group_cases(
    length: int, dops: Sequence[int], chunks: Sequence[int], num_slots: int
) -> Iterator[tuple[int, int, int]]:
    """Yield the cases of a prompt that have room: the DoP, how many GPUs keep KV, and the chunk."""
    for dop in sorted(dops):
        for num_homes in sorted({1, dop}):
            if length <= num_homes * MAX_TOKENS:
                yield dop, num_homes, length
        for chunk in chunks if length <= dop * num_slots else ():
            if chunk < length:
                yield dop, dop, chunk


def group_prefill(group: GpuGroup, length: int, dop: int, num_homes: int, chunk: int) -> float:
    """Return the seconds of a prompt on a group, without compilation."""
    times: list[float] = []
    while not times or (len(times) < 4 and times[-1] < LONG_SECONDS):
        commands = striped_prompt(group, length, dop, num_homes, chunk)
        ran = group.on(dict.fromkeys(range(dop), partial(GpuInstance.run_chunks, commands=commands)))
        begun_at = min(one.begun_at for one in ran.values())
        times.append(max(reported for one in ran.values() for reported in one.reported_at) - begun_at)
    return median(times[1:] or times)


def striped_prompt(group: GpuGroup, length: int, dop: int, num_homes: int, chunk: int) -> list[RunBatch]:
    """Return a prompt of random tokens striped over all GPUs in chunks, whose KV stays on some of them."""
    owner_id, tokens, held = "prompt", torch.randint(1000, (length,)).tolist(), Placement()
    commands = []
    for start in range(0, length, chunk):
        positions = range(start, min(start + chunk, length))
        stripes = [stripe(positions, i, dop) for i in range(dop)]
        plan = BatchPlan(
            ESPGroup(tuple(range(dop))),
            tuple(QueryBlock(owner_id, part, i, Transfer.KV) for i, part in enumerate(stripes)),
            tuple(KVSegment(owner_id, part, i % num_homes) for i, part in enumerate(stripes)),
        )
        params = PARAMS if positions.stop == length else None
        given = RequestInput(owner_id, tokens[start : positions.stop], length, 0, held, params)
        commands.append(RunBatch(group.next_id(), plan, (given,)))
        held = held.adding(plan.writes)
    return commands


def main() -> None:
    parser = script_parser("prefill", __doc__)
    parser.add_argument("--model", default="llama-3.1-8b", help="built-in shape of the model (%(default)s)")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=LENGTHS, help="prompt lengths in tokens (%(default)s)"
    )
    parser.add_argument(
        "--chunks", type=int, nargs="*", default=CHUNKS, help="chunk sizes in tokens (%(default)s)"
    )
    parser.add_argument(
        "--dop",
        type=int,
        nargs="*",
        default=(),
        help="numbers of GPUs in a group, such as 1 2 4 (one GPU without a group)",
    )
    args = parser.parse_args()
    if args.dop:
        rows = measure_groups(args.model, args.lengths, args.dop, args.chunks)
    else:
        rows = measure_one(args.model, args.lengths, args.chunks)
    numbers = {"model": args.model, "torch": torch.__version__, "rows": rows}
    print_result("prefill", numbers, save=args.save)


if __name__ == "__main__":
    main()
