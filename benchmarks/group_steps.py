"""What does a step with a prompt take on a group of GPUs, by what travels in it?

A prompt is striped over the GPUs, alone and beside decodes whose KV lies on all and whose masters they are
by turns, with dummy weights: the median time from the batch's arrival at its workers to its tokens. Beside
it, one GPU with its share of the prompt and of the decodes, which is what each would take if nothing
travelled and nobody waited: the ceiling.
"""

from collections.abc import Sequence
from functools import partial
from statistics import median

import torch
from gpu_group import GpuGroup, GpuInstance, Requests
from one_gpu import PARAMS
from result import print_result, script_parser

from loong.core.instance import ESPGroup
from loong.core.instructions import RequestInput, RunBatch
from loong.core.placement import InstanceId, KVSegment, Placement
from loong.core.plan import BatchPlan, QueryBlock, Transfer
from loong.core.positions import stripe

CASES = ("query:16", "query:512", "query:512+32", "query:2048+32", "query:6144+32", "kv:512", "kv:2048+32")
CONTEXT = 1500  # of each decode, in all
NUM_WARM_UPS, NUM_RUNS = 3, 10
NUM_SLOTS = 131_072


def step(
    batch_id: int, transfer: Transfer, num_tokens: int, decodes: Requests, group: tuple[InstanceId, ...]
) -> RunBatch:
    """A prompt whose first tokens are computed on a group, and the next token of each decode."""
    owner_id, chunk = f"prompt-{batch_id}", range(num_tokens)
    stripes = {i: stripe(chunk, index, len(group)) for index, i in enumerate(group)}
    lease = decodes.lease(batch_id, group, group, num_steps=1)
    queries = [QueryBlock(owner_id, positions, i, transfer) for i, positions in stripes.items()]
    writes = [KVSegment(owner_id, positions, i) for i, positions in stripes.items()]
    given = RequestInput(owner_id, [1] * num_tokens, num_tokens, 0, Placement(), PARAMS)
    plan = BatchPlan(ESPGroup(group), (*queries, *lease.plan.queries), (*writes, *lease.plan.writes))
    return RunBatch(batch_id, plan, (given, *lease.inputs))


def measure(
    gpus: GpuGroup, transfer: Transfer, num_tokens: int, num_decodes: int, group: tuple[InstanceId, ...]
) -> float:
    """Seconds of such a step."""
    decodes = Requests(num_decodes, CONTEXT, group)
    gpus.each(partial(GpuInstance.hold, requests=decodes))
    commands = [
        step(gpus.next_id(), transfer, num_tokens, decodes, group) for _ in range(NUM_WARM_UPS + NUM_RUNS)
    ]
    ran = gpus.each(partial(GpuInstance.run, commands=commands))
    gpus.each(partial(GpuInstance.forget, requests=decodes))
    seconds = [run.told_at[0] - run.begun_at for runs in ran for run in runs[NUM_WARM_UPS:] if run.told_at]
    return median(seconds)


def parsed(case: str) -> tuple[Transfer, int, int]:
    """What travels, the tokens of the prompt, and the number of decodes."""
    transfer, _, sizes = case.partition(":")
    num_tokens, _, num_decodes = sizes.partition("+")
    return Transfer[transfer.upper()], int(num_tokens), int(num_decodes or 0)


def rows_of(gpus: GpuGroup, group: tuple[InstanceId, ...], cases: Sequence[str]) -> list[dict[str, object]]:
    """All cases, printed as they come."""
    print(f"{'travels':>8} {'prompt':>7} {'decodes':>8} {'ms':>8} {'share on one':>14}")
    rows: list[dict[str, object]] = []
    for transfer, num_tokens, num_decodes in map(parsed, cases):
        seconds = measure(gpus, transfer, num_tokens, num_decodes, group)
        share = measure(gpus, transfer, num_tokens // len(group), num_decodes // len(group), (0,))
        name = transfer.name.lower()
        print(f"{name:>8} {num_tokens:>7} {num_decodes:>8} {seconds * 1e3:>8.1f} {share * 1e3:>14.1f}")
        row: dict[str, object] = {"travels": name, "prompt": num_tokens, "decodes": num_decodes}
        rows.append({**row, "seconds": seconds, "share_on_one": share})
    return rows


def main() -> None:
    parser = script_parser("group_steps", __doc__)
    parser.add_argument("--model", default="llama-3.1-8b", help="a built-in shape (%(default)s)")
    parser.add_argument("--num-gpus", type=int, default=2, help="(%(default)s)")
    parser.add_argument(
        "--cases", nargs="+", default=CASES, help="WHAT:PROMPT or WHAT:PROMPT+DECODES; WHAT is query or kv"
    )
    args = parser.parse_args()
    gpus = GpuGroup(args.model, args.num_gpus, NUM_SLOTS)
    print(f"started in {gpus.seconds_to_start:.1f} s")
    numbers = {
        "model": args.model,
        "num_gpus": args.num_gpus,
        "torch": torch.__version__,
        "rows": rows_of(gpus, tuple(range(args.num_gpus)), args.cases),
    }
    print_result("group_steps", numbers, save=args.save)


if __name__ == "__main__":
    main()
