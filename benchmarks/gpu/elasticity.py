"""Measures the cost of changing a group while it decodes, and of moving KV.

- change: consecutive decode leases. From the last token of one to the first of the next takes a step and the
  start of a lease. The cost of a change is the additional time if the next lease has another group, order or
  masters. Ceiling: 100 us.
- bytes: the bytes that all instances send, by the fabric's counters. Growing a group in decode moves no KV. A
  prompt whose KV stays on fewer instances than computed it moves no more than if all kept their part.
- migration: KV not in flight goes from one instance to another and, with four, while two others decode.
  Ceiling: their steps take 3 % longer.
"""

import sys
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import median

import torch

sys.path.append(str(Path(__file__).parents[1] / "support"))

from gpu_group import GpuGroup, GpuInstance, Ran, Requests
from one_gpu import PARAMS
from result import print_result, script_parser

from loong.core.instance import ESPGroup
from loong.core.instructions import MoveKV, RequestInput, RunBatch
from loong.core.placement import KVSegment, Placement
from loong.core.plan import BatchPlan, KVMigration, QueryBlock, Transfer
from loong.core.positions import stripe
from loong.fabric.traffic import Channel, TrafficSnapshot

NUM_STEPS, NUM_ROUNDS = 12, 12
DECODED = Requests(8, 4096, (0, 1))
OTHERS = Requests(32, 4096, (0, 1))
MOVED_TOKENS, NUM_MOVES = 65536, 6
PROMPT_TOKENS = 16384
NUM_OTHER_STEPS = 150
NUM_SLOTS = 160_000
# By the number of instances: the change of each lease of a round, its group and its masters. The first
# follows the last.
CHANGES = {
    2: (
        ("more masters", (0, 1), (0, 1)),
        ("nothing", (0, 1), (0, 1)),
        ("other order", (1, 0), (0, 1)),
        ("other masters", (1, 0), (0,)),
    ),
    4: (
        ("fewer members", (0, 1), (0, 1)),
        ("nothing", (0, 1), (0, 1)),
        ("other order", (1, 0), (0, 1)),
        ("other masters", (1, 0), (0,)),
        ("more members", (0, 1, 2), (0,)),
        ("another member", (0, 1, 3), (0,)),
        ("more masters", (0, 1, 3), (0, 1, 3)),
    ),
}


def run(instance: GpuInstance, commands: Sequence[RunBatch]) -> tuple[list[Ran], TrafficSnapshot]:
    """Run batches; return their times and the bytes sent."""
    before = instance.fabric.traffic.snapshot()
    return instance.run(commands), instance.fabric.traffic.snapshot() - before


def measure_changes(group: GpuGroup, num_instances: int) -> dict[str, object]:
    """Return the time that each kind of change adds to a step, median and worst, in seconds.

    And the KV moved.
    """
    changes = CHANGES[num_instances]
    group.each(partial(GpuInstance.hold, requests=DECODED))
    leases = [
        DECODED.lease(group.next_id(), members, masters, NUM_STEPS)
        for _ in range(NUM_ROUNDS)
        for _, members, masters in changes
    ]
    results = group.each(partial(run, commands=leases))
    group.each(partial(GpuInstance.forget, requests=DECODED))
    reported = [ran.reported_at for ran in results[0][0]]  # of instance 0, a master in all of them
    extra: dict[str, list[float]] = {change: [] for change, *_ in changes}
    for number, (earlier, later) in enumerate(pairwise(reported), start=1):
        step = median(after - before for before, after in pairwise(later))
        if number >= len(changes):  # the first round warms up
            extra[changes[number % len(changes)][0]].append(later[0] - earlier[-1] - step)
    moved = sum(sent[channel].num_bytes for _, sent in results for channel in (Channel.RING, Channel.SEGMENT))
    begun = median(extra["nothing"])
    print(f"{'a lease that changes':>22} {'us beyond a step':>17} {'worst':>8} {'of the change':>14}")
    for change, times in extra.items():
        shown = (
            f"{median(times) * 1e6:>17.0f} {max(times) * 1e6:>8.0f} {(median(times) - begun) * 1e6:>14.0f}"
        )
        print(f"{change:>22} {shown}")
    print(f"KV moved by all of them: {moved} bytes")
    rows = {change: {"seconds": median(times), "worst": max(times)} for change, times in extra.items()}
    return {"changes": rows, "kv_bytes_moved": moved}


def prompt_batch(batch_id: int, num_instances: int, keep_on: Sequence[int]) -> RunBatch:
    """Return a prompt that all instances compute and some keep."""
    owner_id, members = f"prompt-{batch_id}", range(num_instances)
    positions = range(PROMPT_TOKENS)
    queries = tuple(
        QueryBlock(owner_id, stripe(positions, i, num_instances), i, Transfer.KV) for i in members
    )
    writes = tuple(
        KVSegment(owner_id, stripe(positions, index, len(keep_on)), i) for index, i in enumerate(keep_on)
    )
    given = RequestInput(owner_id, [1] * PROMPT_TOKENS, PROMPT_TOKENS, 0, Placement(), PARAMS)
    return RunBatch(batch_id, BatchPlan(ESPGroup(tuple(members)), queries, writes), (given,))


def measure_retention(group: GpuGroup, num_instances: int) -> dict[str, int]:
    """Return the bytes that all instances send for a prompt, by how many of them keep it."""
    sent = {}
    for num_keepers in sorted({num_instances, 2, 1}, reverse=True):
        batch = prompt_batch(group.next_id(), num_instances, range(num_keepers))
        results = group.each(partial(run, commands=[batch]))
        sent[str(num_keepers)] = sum(traffic.total.num_bytes for _, traffic in results)
        print(f"prompt of {PROMPT_TOKENS} kept on {num_keepers}: {sent[str(num_keepers)]} bytes sent")
    return sent


def measure_migration(group: GpuGroup, num_instances: int) -> dict[str, float]:
    """Return the bytes a second from the last instance but one to the last."""
    moved = Requests(1, MOVED_TOKENS, (num_instances - 2,))
    group.each(partial(GpuInstance.hold, requests=moved))
    group.each(partial(GpuInstance.move, commands=moves_of(group, moved, num_instances - 1)))  # warms up
    results = group.each(partial(GpuInstance.move, commands=moves_of(group, moved, num_instances - 1)))
    ran = results[num_instances - 1]
    speed = NUM_MOVES * MOVED_TOKENS * group.kv_bytes_per_token / (ran.reported_at[-1] - ran.begun_at)
    group.each(partial(GpuInstance.forget, requests=moved))
    print(f"migration: {speed / 1e9:.0f} GB/s")
    return {"bytes_per_second": speed}


def moves_of(group: GpuGroup, moved: Requests, destination_id: int) -> list[MoveKV]:
    """Return `NUM_MOVES` copies of one migration."""
    (owner_id,) = moved.owner_ids
    migration = KVMigration(moved.segment(owner_id, 0), destination_id)
    return [MoveKV(group.next_id(), migration) for _ in range(NUM_MOVES)]


def measure_other_steps(group: GpuGroup) -> dict[str, float]:
    """Return the steps of instances 0 and 1, alone and while KV goes from 2 to 3."""
    moved = Requests(1, MOVED_TOKENS, (2,))
    for requests in (OTHERS, moved):
        group.each(partial(GpuInstance.hold, requests=requests))
    lease = OTHERS.lease(group.next_id(), OTHERS.held_on, OTHERS.held_on, NUM_OTHER_STEPS)
    alone, *_ = group.each(partial(GpuInstance.run, commands=[lease]))
    lease = OTHERS.lease(group.next_id(), OTHERS.held_on, OTHERS.held_on, NUM_OTHER_STEPS)
    both = group.each(partial(decode_or_move, lease=lease, moves=moves_of(group, moved, 3)))
    seconds = both[3].reported_at[-1] - both[3].begun_at
    before, during = _step_seconds(alone[0]), _step_seconds(both[0], seconds)
    print(f"steps on other instances: {before * 1e3:.3f} ms; during the migration {during * 1e3:.3f} ms")
    return {"step_alone": before, "step_during": during}


def decode_or_move(instance: GpuInstance, lease: RunBatch, moves: Sequence[MoveKV]) -> Ran:
    """Run the lease on its instances, and migrations on the others, each reported like a step."""
    if instance.instance_id in lease.plan.group.instance_ids:
        return instance.run([lease])[0]
    return instance.move(moves)


def _step_seconds(ran: Ran, until: float = inf) -> float:
    """Return the median step of a lease, of those in its first seconds."""
    reported_at = [at for at in ran.reported_at if at - ran.begun_at < until]
    return median(later - earlier for earlier, later in pairwise(reported_at))


def main() -> None:
    parser = script_parser("elasticity", __doc__)
    parser.add_argument("--model", default="llama-3.1-8b", help="built-in shape of the model (%(default)s)")
    parser.add_argument(
        "--num-gpus",
        type=int,
        choices=CHANGES,
        default=4,
        help="number of GPUs; with 2, some changes are left out (%(default)s)",
    )
    args = parser.parse_args()
    group = GpuGroup(args.model, args.num_gpus, NUM_SLOTS)
    print(f"started in {group.seconds_to_start:.1f} s")
    numbers = {
        "model": args.model,
        "torch": torch.__version__,
        "num_gpus": args.num_gpus,
        **measure_changes(group, args.num_gpus),
        "migration": measure_migration(group, args.num_gpus),
        "other_steps": measure_other_steps(group) if args.num_gpus == 4 else None,
        "prompt_bytes_sent": measure_retention(group, args.num_gpus),
    }
    print_result("elasticity", numbers, save=args.save)


if __name__ == "__main__":
    main()
