"""Measures a step with a prompt on a group of GPUs, by the tensors that travel in it.

A prompt, or a chunk after its history, is striped over the GPUs, with dummy weights. It runs alone and with
decodes whose KV is on all GPUs and whose masters they are in turn. It reports the median time from the
batch's arrival at its workers to its tokens. The ceiling is one GPU with its share of the prompt, of the
history and of the decodes: the time without transfers and waits. With a history, however, each GPU of a group
attends twice as much or more.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch

sys.path.append(str(Path(__file__).parents[1] / "support"))

from gpu_group import GpuGroup, GpuInstance, Requests
from one_gpu import PARAMS
from result import print_result, script_parser

from loong.core.instance import ESPGroup
from loong.core.instructions import RequestInput, RunBatch
from loong.core.placement import InstanceId, KVSegment, Placement
from loong.core.plan import BatchPlan, QueryBlock, Transfer
from loong.core.positions import stripe

CASES = ("query:16", "query:512", "query:512+32", "query:2048+32", "query:6144+32", "kv:512", "kv:2048+32")
CONTEXT = 1500  # of each decode, in total
NUM_WARM_UPS, NUM_RUNS = 3, 10
NUM_SLOTS = 131_072


@dataclass(frozen=True, slots=True)
class Case:
    """The kind of transfer, and the tokens of a chunk, of its history, and of decodes."""

    transfer: Transfer
    num_tokens: int
    num_cached: int
    num_decodes: int

    @classmethod
    def parsed(cls, case: str) -> "Case":
        """Parse a case of the command line."""
        transfer, _, sizes = case.partition(":")
        chunk, _, num_decodes = sizes.partition("+")
        num_tokens, _, num_cached = chunk.partition("@")
        return cls(Transfer[transfer.upper()], int(num_tokens), int(num_cached or 0), int(num_decodes or 0))

    def share(self, dop: int) -> "Case":
        """Return the share of one of `dop` instances."""
        return Case(self.transfer, self.num_tokens // dop, self.num_cached // dop, self.num_decodes // dop)


def step(batch_id: int, case: Case, prompt: Requests, decodes: Requests) -> RunBatch:
    """Return the next chunk of a prompt on the group that has its KV, and the next token of each decode."""
    group, (owner_id,) = prompt.held_on, prompt.owner_ids
    end = prompt.context + case.num_tokens
    stripes = {i: stripe(range(prompt.context, end), index, len(group)) for index, i in enumerate(group)}
    lease = decodes.lease(batch_id, group, group, num_steps=1)
    queries = [QueryBlock(owner_id, positions, i, case.transfer) for i, positions in stripes.items()]
    writes = [KVSegment(owner_id, positions, i) for i, positions in stripes.items()]
    held = prompt.placement(owner_id) if prompt.context else Placement()
    given = RequestInput(owner_id, [1] * case.num_tokens, end, 0, held, PARAMS)
    plan = BatchPlan(ESPGroup(group), (*queries, *lease.plan.queries), (*writes, *lease.plan.writes))
    return RunBatch(batch_id, plan, (given, *lease.inputs))


def measure(gpus: GpuGroup, case: Case, group: tuple[InstanceId, ...]) -> float:
    """Return the seconds of such a step."""
    prompt = Requests(1, case.num_cached, group, "prompt")
    decodes = Requests(case.num_decodes, CONTEXT, group)
    for requests in (prompt, decodes):
        gpus.each(partial(GpuInstance.hold, requests=requests))
    commands = [step(gpus.next_id(), case, prompt, decodes) for _ in range(NUM_WARM_UPS + NUM_RUNS)]
    ran = gpus.each(partial(GpuInstance.run, commands=commands))
    for requests in (prompt, decodes):
        gpus.each(partial(GpuInstance.forget, requests=requests))
    seconds = [
        run.reported_at[0] - run.begun_at for runs in ran for run in runs[NUM_WARM_UPS:] if run.reported_at
    ]
    return median(seconds)


def rows_of(gpus: GpuGroup, group: tuple[InstanceId, ...], cases: Sequence[str]) -> list[dict[str, object]]:
    """Return the rows of all cases, printed as they come."""
    print(f"{'travels':>8} {'prompt':>7} {'behind':>7} {'decodes':>8} {'ms':>8} {'share on one':>14}")
    rows: list[dict[str, object]] = []
    for case in map(Case.parsed, cases):
        seconds, share = measure(gpus, case, group), measure(gpus, case.share(len(group)), (0,))
        name, sizes = case.transfer.name.lower(), (case.num_tokens, case.num_cached, case.num_decodes)
        reported = " ".join(f"{size:>{width}}" for size, width in zip(sizes, (7, 7, 8), strict=True))
        print(f"{name:>8} {reported} {seconds * 1e3:>8.1f} {share * 1e3:>14.1f}")
        row = dict(zip(("prompt", "cached", "decodes"), sizes, strict=True))
        rows.append({"travels": name, **row, "seconds": seconds, "share_on_one": share})
    return rows


def main() -> None:
    parser = script_parser("group_steps", __doc__)
    parser.add_argument("--model", default="llama-3.1-8b", help="built-in shape of the model (%(default)s)")
    parser.add_argument("--num-gpus", type=int, default=2, help="number of GPUs (%(default)s)")
    parser.add_argument(
        "--cases",
        nargs="+",
        default=CASES,
        help="cases, each TRANSFER:PROMPT[@HISTORY][+DECODES], where TRANSFER is query or kv (%(default)s)",
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
