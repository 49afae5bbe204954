"""Figures 7 and 12 of Infinite-LLM as its performance model predicts them: Llama-2-7B on two A800s.

Figure 7: a debtor with one long context lends blocks to a creditor with a batch of chats. Chats that wait
join the debtor in the room that it frees. The paper has a context of 1,000k tokens, which no A100 holds (524
GB with this model); here it nearly fills a pool. Its total rises from 6,500 to 8,800 tokens/s and then
declines. The last column says whether all blocks hide behind local attention (figure 6a).

Figure 12: the throughput of a batch while some tokens of KV move under each step. A move that takes longer
than the step delays the next. The paper loses nothing with 16 tokens, and 8.6 % with 32, on links of 125
MB/s. Needs no device.

    python benchmarks/evaluation/infinite_figures.py
"""

import argparse
import shlex
import sys
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))

from result import print_result, script_parser

from loong.hardware.model_shape import shape_of
from loong.lending.greedy import InstanceLoad, num_hidden, pair_rate
from loong.model.shapes import find_config
from loong.scheduler.infinite.paper import StepModel
from loong.scheduler.tuning import LENT_BLOCK, MOVED_PER_STEP
from loong.simulation.cluster import Hardware
from loong.workloads.report.report import table

SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # of the context that moves
NUM_MOVED = (0, 8, 16, 32, 64)  # tokens a step


def figure_7(model: StepModel, pool: int, args: argparse.Namespace) -> list[dict[str, float]]:
    """Return the tokens a second of both by the blocks that move. A creditor without room loses chats."""
    chat, context = -(-args.chat // LENT_BLOCK), int(0.95 * pool)
    debtor = InstanceLoad(0, 1, context, pool - context, context, pool, "long", context - 1)
    num_chats = args.num_chats
    creditor = InstanceLoad(1, num_chats, num_chats * chat, pool - num_chats * chat, num_chats * chat, pool)
    stops = list(accumulate([chat] * (pool // chat)))
    most = num_hidden(debtor, 1, context - 1, model)
    nobody = InstanceLoad(2, 0, 0, 0, 0, pool)
    found = []
    for num_blocks in sorted({*(int(share * context) for share in SHARES), min(most, creditor.num_room)}):
        num_lost = max(0, -(-(num_blocks - creditor.num_room) // chat))
        left = replace(
            creditor, batch_size=num_chats - num_lost, num_keys=creditor.num_keys - num_lost * chat
        )
        lent = debtor.lending_to(1, num_blocks) if num_blocks else debtor
        rates = pair_rate(lent, nobody, stops, model), pair_rate(nobody, left.hosting(num_blocks), (), model)
        found.append(
            {"blocks": num_blocks, "debtor": rates[0], "creditor": rates[1], "is_hidden": num_blocks <= most}
        )
    return found


def figure_12(model: StepModel, num_bytes: int, args: argparse.Namespace) -> list[dict[str, float]]:
    """Return the throughput by the tokens that move under a step, relative to that without moves."""
    num_blocks = args.num_chats * -(-args.chat // LENT_BLOCK)
    step = model.seconds(args.num_chats, num_blocks)
    found = []
    for num_tokens in NUM_MOVED:
        slow, fast = num_tokens * num_bytes / args.link, model.cost_model.migration_time(num_tokens, 0, 1)
        copying = model.cost_model.copying_time(num_tokens)
        found.append(
            {
                "tokens": num_tokens,
                "ethernet": step / max(step + copying, slow),
                "nvlink": step / max(step + copying, fast if num_tokens else 0.0),
            }
        )
    return found


def main() -> None:
    parser = script_parser("infinite_figures", __doc__)
    parser.add_argument("--model", default="llama-2-7b", help="model to simulate (%(default)s)")
    parser.add_argument("--device", default="a800", help="device to simulate (%(default)s)")
    parser.add_argument("--chat", type=int, default=500, help="tokens of a chat (%(default)s)")
    parser.add_argument("--num-chats", type=int, default=100, help="chats of the creditor (%(default)s)")
    parser.add_argument("--link", type=float, default=125e6, help="bytes/s between machines (%(default)g)")
    args = parser.parse_args()
    shape = shape_of(find_config(args.model, "dummy"))
    cluster = Hardware(shape, args.device, num_instances=2).cluster("infinite")
    model = StepModel(cluster.cost_model)
    seventh = figure_7(model, cluster.instances[0].kv_capacity // LENT_BLOCK, args)
    twelfth = figure_12(model, shape.kv_bytes, args)
    lent = [
        (
            f"{row['blocks']:,.0f}",
            f"{row['debtor']:,.0f}",
            f"{row['creditor']:,.0f}",
            f"{row['debtor'] + row['creditor']:,.0f}",
            "yes" if row["is_hidden"] else "no",
        )
        for row in seventh
    ]
    print(table(("blocks lent", "debtor tokens/s", "creditor tokens/s", "together", "hides"), lent))
    moved = [(f"{row['tokens']:.0f}", f"{row['ethernet']:.1%}", f"{row['nvlink']:.1%}") for row in twelfth]
    print(table(("tokens moved a step", f"throughput, {args.link / 1e6:g} MB/s", "within a host"), moved))
    numbers = {"figure_7": seventh, "figure_12": twelfth, "moved_per_step": MOVED_PER_STEP}
    command = shlex.join(["python", *sys.argv])
    print_result("infinite_figures", {"command": command, **numbers}, save=args.save)


if __name__ == "__main__":
    main()
