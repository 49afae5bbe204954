"""`loong plan`: flags and output."""

import argparse
import json
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from loong.core.errors import ConfigError
from loong.launcher.flags import positive

if TYPE_CHECKING:
    from loong.hardware.device_mix import Demand, Offer, OfferedDevice

NUM_SHOWN = 5
MOST = 1e12  # of a number in the file
_EXAMPLES = """\
examples:
  loong plan --devices docs/examples/devices.yaml --model llama-2-13b --workload sharegpt --slo tight
  loong plan --devices devices.yaml --model ./Llama-3.1-8B --workload leval --slo tpot:50 --request-rate 20
"""


class _Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A device of the file: peaks, and the shares of them that it sustains."""

    price: float
    memory_gb: float
    bandwidth_gbps: float
    link_gbps: float
    tflops: float = 0.0
    latency_us: float = 33.0
    peer_gbps: float | None = None
    peer_latency_us: float = 10.0
    sustained_bandwidth: float = 0.8
    sustained_flops: float = 0.65


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command `plan`."""
    parser = subparsers.add_parser(
        "plan",
        help="find the mix of devices that serves a workload at the least price",
        description="Compare units of computing devices alone with units whose KV is on cheaper devices "
        "that only attend (Lamina), by tokens of answers a second and price.",
        epilog=_EXAMPLES,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--devices",
        type=Path,
        required=True,
        metavar="FILE",
        help="YAML: for each device price, memory_gb, bandwidth_gbps, link_gbps (gigabytes a second) and, if "
        "it computes, tflops",
    )
    parser.add_argument(
        "--model", required=True, metavar="MODEL", help="a shape that `loong models` lists, or a folder"
    )
    parser.add_argument("--workload", default="sharegpt", metavar="SPEC", help="workload (%(default)s)")
    parser.add_argument("--slo", default="tight", metavar="RULE", help="rule with a TPOT bound (%(default)s)")
    parser.add_argument(
        "--request-rate", type=float, metavar="R", help="requests a second to serve: shows how many units"
    )
    parser.add_argument(
        "--num-requests", type=positive, default=1000, metavar="N", help="drawn for the means (%(default)s)"
    )
    parser.add_argument(
        "--prompts-elsewhere", action="store_true", help="prompts are computed on other devices, not counted"
    )
    parser.add_argument(
        "--most-memory-devices", type=positive, default=16, metavar="N", help="in a unit (%(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Print the cheapest mixes and return 0."""
    from loong.hardware.device_mix import offers  # these import what `--help` can do without
    from loong.hardware.model_shape import shape_of
    from loong.model.shapes import find_config

    if args.request_rate is not None and args.request_rate <= 0:
        raise ConfigError(f"--request-rate must be above 0, but is {args.request_rate:g}")
    shape = shape_of(find_config(args.model, "dummy"))
    devices = read_devices(args.devices)
    demand = _demand(args)
    found = offers(shape, demand, devices, args.most_memory_devices)
    if not found:
        names = ", ".join(device.name for device in devices)
        bound = f"a token in {demand.tpot * 1e3:g} ms"
        raise ConfigError(f"no mix of {names} has room for {args.model} and its KV, and time for {bound}")
    lengths = f"{demand.num_prompt_tokens:,.0f} tokens in and {demand.num_output_tokens:,.0f} out"
    print(f"{args.workload}: {lengths} on average; TPOT of at most {demand.tpot * 1e3:g} ms")
    alone = next((offer for offer in found if offer.mix.memory is None), None)
    shown = found[:NUM_SHOWN]
    if alone is not None and alone not in shown:
        shown = [*shown, alone]
    _print_table(shown, args.request_rate)
    if alone is not None:
        gain = found[0].rate_per_price / alone.rate_per_price
        print(f"For its price the first gives {gain:.2f} times the tokens of the best alone, {alone.mix}.")
    print(json.dumps({"offers": [_row(offer, args.request_rate) for offer in shown]}))
    return 0


def read_devices(path: Path) -> "list[OfferedDevice]":
    """Return the devices of a file. Raises `ConfigError` for what it must not have."""
    from loong.hardware.device_mix import OfferedDevice

    try:
        devices = msgspec.yaml.decode(path.read_bytes(), type=dict[str, _Device])
    except OSError as error:
        raise ConfigError(f"--devices {path} cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--devices {path}: {error}") from error
    for name, device in devices.items():
        for field, value in msgspec.structs.asdict(device).items():
            most = 1.0 if field.startswith("sustained") else MOST
            is_optional = field == "tflops" or value is None
            if not (is_optional and not value) and not 0 < value <= most:
                limits = f"above 0 and at most {most:g}"
                raise ConfigError(f"--devices {path}: {field} of {name} must be {limits}, but is {value:g}")
    if not devices:
        raise ConfigError(f"--devices {path} names no device")
    return [
        OfferedDevice(
            name,
            d.price,
            d.memory_gb * 1e9,
            d.bandwidth_gbps * 1e9 * d.sustained_bandwidth,
            d.tflops * 1e12 * d.sustained_flops,
            d.link_gbps * 1e9,
            d.latency_us * 1e-6,
            (d.peer_gbps or d.link_gbps) * 1e9,
            d.peer_latency_us * 1e-6,
        )
        for name, d in devices.items()
    ]


def _demand(args: argparse.Namespace) -> "Demand":
    from loong.hardware.device_mix import Demand
    from loong.workloads.metrics.slo import parse_slo
    from loong.workloads.workload import endless_workload

    rule = parse_slo(args.slo, workload=args.workload)
    if not rule.tpot < float("inf"):
        raise ConfigError(f"--slo {args.slo} bounds no TPOT, by which a batch is sized")
    drawn = list(islice(endless_workload(args.workload, seed=0), args.num_requests))
    return Demand(
        sum(r.num_prompt_tokens for r in drawn) / len(drawn),
        sum(r.num_output_tokens for r in drawn) / len(drawn),
        rule.tpot * rule.scale,
        has_prompts=not args.prompts_elsewhere,
    )


def _row(offer: "Offer", request_rate: float | None) -> dict[str, object]:
    return {
        "mix": str(offer.mix),
        "price": offer.mix.price,
        "batch_size": offer.batch_size,
        "tpot": offer.step_time(offer.batch_size),
        "prefill_time": offer.prefill_time,
        "output_rate": offer.output_rate,
        "rate_per_price": offer.rate_per_price,
        "needed_bandwidth": offer.needed_bandwidth if offer.mix.memory else None,
        "num_units": None if request_rate is None else offer.num_units(request_rate),
    }


def _print_table(shown: "list[Offer]", request_rate: float | None) -> None:
    titles = ["unit", "price", "batch", "TPOT ms", "prompt ms", "tokens/s", "a price of 1,000", "link GB/s"]
    titles.append("units")
    rows = [
        [
            str(offer.mix),
            f"{offer.mix.price:,.0f}",
            f"{offer.batch_size:,}",
            f"{offer.step_time(offer.batch_size) * 1e3:.1f}",
            f"{offer.prefill_time * 1e3:,.0f}",
            f"{offer.output_rate:,.0f}",
            f"{offer.rate_per_price * 1e3:,.1f}",
            f"{offer.needed_bandwidth / 1e9:.1f}" if offer.mix.memory else "-",
            "-" if request_rate is None else f"{offer.num_units(request_rate):,}",
        ]
        for offer in shown
    ]
    widths = [max(len(row[i]) for row in (titles, *rows)) for i in range(len(titles))]
    for row in (titles, *rows):
        print("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]))
