"""Figures of Lamina by the formulas of `loong plan`, with its devices and prices, and as published.

Version 1 (A100s of 40 GB, and others at the price of RTX 3090s as memory; LLaMA-13B on one and 33B on two):
batch, throughput and throughput per price of the largest batches (figures 12 and 13), as multiples of the
same computing devices alone; and ShareGPT on 33B by the number of memory devices (figure 17). Version 2
(H100s and H20s at equal cost): tokens/s on four traces (its figure 10). Prompts are computed elsewhere, as
in both papers. Each multiple has a bound: the same batch, if nothing that travels took time and products
and attention hid each other. Needs no device.

    python benchmarks/evaluation/lamina_figures.py    # seconds
"""

import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))

from result import print_result, script_parser

from loong.hardware.device_mix import Demand, Mix, Offer, OfferedDevice
from loong.hardware.model_shape import shape_of
from loong.launcher.plan.command import read_devices
from loong.model.shapes import find_config
from loong.scheduler.cost.roofline import ModelShape
from loong.workloads.report.report import table
from loong.workloads.workload import endless_workload

DEVICES = Path(__file__).parent / "devices"
CONTEXTS = (512, 1024, 2048, 4096)
MEMORY = (1, 2, 3, 4, 6, 8)
ANY_TIME = 1e6  # seconds a token: the batch is bound by room alone
TRACES = {  # v2, table 4: mean tokens of prompts and answers
    "Azure-Conv": (1154.7, 211.1),
    "Azure-Code": (2047.8, 27.9),
    "Kimi-Conv": (12035.1, 342.6),
    "Kimi-TA": (8560.0, 182.1),
}


def llama(num_layers: int, hidden_size: int, intermediate_size: int) -> ModelShape:
    """Return the shape of a LLaMA of the first version, with heads of 128 and 32,000 tokens."""
    num_heads = hidden_size // 128
    parameters = num_layers * hidden_size * (4 * hidden_size + 3 * intermediate_size)
    return ModelShape(num_layers, hidden_size, num_heads, num_heads, 128, parameters, 32_000 * hidden_size)


LLAMA_13B, LLAMA_33B = llama(40, 5120, 13_824), llama(60, 6656, 17_920)
LLAMA_65B = llama(80, 8192, 22_016)


@dataclass(frozen=True, slots=True)
class Compared:
    """A unit with memory devices, as multiples of one without; `bound` is one on the multiple of tokens/s."""

    model: str
    load: str
    unit: str
    batch: int
    batch_alone: int
    tpot: float
    batch_ratio: float
    rate_ratio: float
    bound: float
    price_ratio: float


def free_to_travel(device: OfferedDevice) -> OfferedDevice:
    """Return a device to and from which everything travels in no time."""
    return replace(device, link_bandwidth=1e30, peer_bandwidth=1e30, latency=0.0, peer_latency=0.0)


def bound_of(offer: Offer) -> float:
    """Return the tokens/s of its batch if nothing else took time than products or attention of it."""
    mix = offer.mix
    assert mix.memory is not None
    ideal = replace(
        offer,
        mix=replace(
            mix,
            computing=free_to_travel(mix.computing),
            memory=free_to_travel(mix.memory),
            num_micro_batches=1,
        ),
    )
    products = ideal.products_time(offer.batch_size)
    attention = ideal.step_time(offer.batch_size) - products
    return offer.batch_size / max(products, attention)


def compared(model: str, load: str, offer: Offer, alone: Offer) -> Compared:
    """Return the comparison of a unit with one without memory devices."""
    return Compared(
        model,
        load,
        str(offer.mix),
        offer.batch_size,
        alone.batch_size,
        offer.step_time(offer.batch_size),
        offer.batch_size / alone.batch_size,
        offer.output_rate / alone.output_rate,
        bound_of(offer) / alone.output_rate,
        offer.rate_per_price / alone.rate_per_price,
    )


def of_version_1() -> Iterator[Compared]:
    """Yield figures 12 and 13: all numbers of memory devices, whole batches and halves."""
    computing, memory = read_devices(DEVICES / "lamina_v1.yaml")
    for name, shape, number in (("LLaMA-13B", LLAMA_13B, 1), ("LLaMA-33B", LLAMA_33B, 2)):
        for context in CONTEXTS:
            demand = Demand(context - 1, 1, ANY_TIME, has_prompts=False)
            alone = Offer(shape, demand, Mix(computing, number))
            for num_memory in MEMORY:
                for parts in (1, 2):
                    offer = Offer(shape, demand, Mix(computing, number, memory, num_memory, parts))
                    yield compared(name, f"{context:,} tokens", offer, alone)


def on_sharegpt(num_requests: int) -> Iterator[Compared]:
    """Yield figure 17: LLaMA-33B on two A100s with more and more memory devices."""
    computing, memory = read_devices(DEVICES / "lamina_v1.yaml")
    drawn = list(islice(endless_workload("sharegpt", seed=0), num_requests))
    num_prompt = sum(r.num_prompt_tokens for r in drawn) / len(drawn)
    num_output = sum(r.num_output_tokens for r in drawn) / len(drawn)
    demand = Demand(num_prompt, num_output, ANY_TIME, has_prompts=False)
    alone = Offer(LLAMA_33B, demand, Mix(computing, 2))
    for num_memory in MEMORY:
        for parts in (1, 2):
            offer = Offer(LLAMA_33B, demand, Mix(computing, 2, memory, num_memory, parts))
            yield compared("LLaMA-33B", "sharegpt", offer, alone)


def of_version_2() -> Iterator[Compared]:
    """Yield its figure 10: units of equal cost."""
    h100, h20 = read_devices(DEVICES / "lamina_v2.yaml")
    models = (
        ("LLaMA-33B", LLAMA_33B, 1, 2),
        ("LLaMA-65B", LLAMA_65B, 2, 4),
        ("LLaMA3-70B", shape_of(find_config("llama-3.1-70b", "dummy")), 2, 4),
    )
    for name, shape, num_computing, num_memory in models:
        for trace, (num_prompt, num_output) in TRACES.items():
            demand = Demand(num_prompt, num_output, ANY_TIME, has_prompts=False)
            alone = Offer(shape, demand, Mix(h100, 2 * num_computing))
            for parts in (1, 2):
                offer = Offer(shape, demand, Mix(h100, num_computing, h20, num_memory, parts))
                yield compared(name, trace, offer, alone)


def shown(title: str, found: Sequence[Compared]) -> None:
    """Print a table."""
    print(title)
    names = ("model", "load", "unit", "batch", "alone", "ms", "batch x", "tokens/s x", "bound x", "price x")
    rows = [
        (
            c.model,
            c.load,
            c.unit,
            f"{c.batch:,}",
            f"{c.batch_alone:,}",
            f"{1e3 * c.tpot:.0f}",
            *(f"{x:.2f}" for x in (c.batch_ratio, c.rate_ratio, c.bound, c.price_ratio)),
        )
        for c in found
    ]
    print(table(names, rows))


def spread(found: Sequence[Compared], name: str) -> str:
    """Return the least and the greatest of a number."""
    values = [asdict(one)[name] for one in found]
    return f"{min(values):.2f} to {max(values):.2f}"


def main() -> None:
    parser = script_parser("lamina_figures", __doc__)
    args = parser.parse_args()
    first, chats, second = list(of_version_1()), list(on_sharegpt(1000)), list(of_version_2())
    shown("Version 1, figures 12 and 13: multiples of the same A100s alone", first)
    shown("Version 1, figure 17: ShareGPT", chats)
    shown("Version 2, its figure 10: multiples of H100s of equal cost", second)
    three = [c for c in first if "+ 3 " in c.unit]
    print(
        f"Largest batches: {spread(three, 'batch_ratio')} times with three memory devices, "
        f"{spread(first, 'batch_ratio')} with 1 to 8; published 10.7 to 64.0"
    )
    for name, words, published in (
        ("rate_ratio", "tokens/s", "1.75 to 20.5 whole"),
        ("price_ratio", "tokens/s and price", "1.48 to 12.1"),
    ):
        print(f"{words}: {spread(three, name)} with three, {spread(first, name)} all; published {published}")
    halves = [c for c in second if "halves" in c.unit]
    whole = [c for c in second if "halves" not in c.unit]
    print(f"Version 2, tokens/s: {spread(whole, 'rate_ratio')}, in halves {spread(halves, 'rate_ratio')},")
    print(f"at most {spread(halves, 'bound')} by the bound; published 1.161 to 1.901")
    mean = sum(c.batch_ratio for c in whole) / len(whole)
    print(f"batches: {mean:.2f} times on average; published 2.39")
    numbers = {
        "command": shlex.join(["python", *sys.argv]),
        "version_1": [asdict(c) for c in first],
        "sharegpt": [asdict(c) for c in chats],
        "version_2": [asdict(c) for c in second],
    }
    print_result("lamina_figures", numbers, save=args.save)


if __name__ == "__main__":
    main()
