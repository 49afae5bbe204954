"""Parsers of values on the command line, and flags that several commands share."""

import argparse
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import TypeVar

from loong.workloads.spec import usage

T = TypeVar("T")

MAX_PORT = 65535
_FACTORS = {"k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}


def token_count(text: str) -> int:
    """Parse a number of tokens above 0: 25600, 25.6k (thousands) or 25K (1,024s), also m and M."""
    number, factor = text, 1
    if text[-1:] in _FACTORS:
        number, factor = text[:-1], _FACTORS[text[-1]]
    try:
        count = float(number) * factor
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of tokens; write 25600, 25.6k or 25K"
        ) from None
    if not 0 < count < 2**53 or count != int(count):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no whole number of tokens above 0; write 25600, 25.6k or 25K"
        )
    return int(count)


def positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def count(text: str) -> int:
    """Parse a whole number of at least 0."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 0")
    return int(text)


def port(text: str) -> int:
    """Parse a TCP port, or 0 for any that is free."""
    if not text.isascii() or not text.isdigit() or int(text) > MAX_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is no port from 0 to {MAX_PORT}")
    return int(text)


def seconds(text: str) -> float:
    """Parse a time above 0, in seconds."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return value


def target(text: str) -> float:
    """Parse a time above 0, in seconds, or `none`, which is an infinite one."""
    return inf if text == "none" else seconds(text)


def wait_seconds(text: str) -> float:
    """Parse a time of 0 or more, in seconds."""
    try:
        value = float(text)
    except ValueError:
        value = inf
    if not 0 <= value < inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds of 0 or more")
    return value


def ratio(text: str) -> float:
    """Parse a number above 0, such as 0.5 or 1/64."""
    numerator, slash, denominator = text.partition("/")
    try:
        value = float(numerator) / (float(denominator) if slash else 1.0)
    except (ValueError, ZeroDivisionError):
        value = 0.0
    if not 0 < value < inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0 such as 0.5 or 1/64")
    return value


def share(text: str) -> float:
    """Parse a number above 0 and at most 1."""
    value = ratio(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is above 1")
    return value


def part(text: str) -> float:
    """Parse a number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = inf
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to 1")
    return value


def add_prefix_caching_flag(group: argparse._ActionsContainer, *, is_of_serve: bool = False) -> None:
    """Add the flags of the prefix cache; with `is_of_serve`, None leaves them to `loong serve`."""
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=None if is_of_serve else True,
        help="keep KV of ended requests while there is room, for prompts that begin like theirs (on)",
    )
    group.add_argument(
        "--relay",
        action=argparse.BooleanOptionalAction,
        default=None if is_of_serve else True,
        help="read KV that requests share once in a step, for all of them, where that is faster (on)",
    )


def add_host_tier_flag(group: argparse._ActionsContainer) -> None:
    """Add the flag for KV in memory of the host; `host_tier_words` repeats it for `loong serve`."""
    group.add_argument(
        "--host-kv-tokens",
        type=or_auto(token_count),
        default=0,
        metavar="N",
        help="tokens of KV that each instance also keeps in memory of its host (none; auto: what fits half "
        "of the memory that is left)",
    )


def add_memory_instance_flags(group: argparse._ActionsContainer, auto: str) -> None:
    """Add the flags for instances that hold KV without weights, where `auto` is the default size in words."""
    group.add_argument(
        "--memory-instances",
        type=count,
        default=0,
        metavar="N",
        help="number of instances without weights, which hold KV and attend for the others (%(default)s)",
    )
    group.add_argument(
        "--memory-kv-tokens",
        type=or_auto(token_count),
        metavar="N",
        help=f"tokens of KV on each memory instance (auto: {auto})",
    )


def host_tier_words(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the same flag for a server that is started here, if it is given."""
    if args.host_kv_tokens == 0:
        return ()
    return ("--host-kv-tokens", "auto" if args.host_kv_tokens is None else str(args.host_kv_tokens))


def prefix_caching_words(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the same flags for a server that is started here, as far as they are given."""
    given = {"enable-prefix-caching": args.enable_prefix_caching, "relay": args.relay}
    return tuple([f"--{'' if is_on else 'no-'}{name}" for name, is_on in given.items() if is_on is not None])


def add_workload_flags(group: argparse._ArgumentGroup, *, is_scale_chosen: bool = False) -> None:
    """Add the flags for the workload; see `add_drawing_flags` for the rest."""
    group.add_argument(
        "--workload",
        default="mixed",
        metavar="SPEC",
        help=f"workload to send: {usage()}, or a mix such as 0.7*sharegpt+0.3*leval; with @poisson(2), "
        "@gamma(2,0.5), @constant(2), @closed(8) or @replay(2) behind it if it has a pace (%(default)s)",
    )
    add_drawing_flags(group, is_scale_chosen=is_scale_chosen)


def add_drawing_flags(group: argparse._ActionsContainer, *, is_scale_chosen: bool = False) -> None:
    """Add the flags for how requests are drawn.

    `is_scale_chosen` makes the default length scale `auto`, None.
    """
    group.add_argument(
        "--burstiness",
        type=float,
        help="shape of the gamma distribution of gaps between arrivals: 1 is Poisson, inf constant (1)",
    )
    group.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of the requests: their times, lengths and what they share (%(default)s)",
    )
    scaled = "factor that multiplies prompt and output lengths, such as 1/64"
    if is_scale_chosen:
        group.add_argument(
            "--length-scale",
            type=or_auto(ratio),
            metavar="X",
            help=f"{scaled} (auto: by the largest power of two that fits what is served, and a minute)",
        )
    else:
        group.add_argument("--length-scale", type=ratio, default=1.0, metavar="X", help=f"{scaled} (1)")
    group.add_argument(
        "--output-scale",
        type=ratio,
        metavar="X",
        help="factor that multiplies output lengths (--length-scale, but at least 16 tokens)",
    )


def add_goal_flags(group: argparse._ActionsContainer) -> None:
    """Add the flags for how many requests must meet their SLO."""
    group.add_argument(
        "--slo-scale",
        type=ratio,
        default=1.0,
        metavar="X",
        help="factor that multiplies every bound of the SLO (1)",
    )
    group.add_argument(
        "--attainment",
        type=ratio,
        default=90.0,
        metavar="%",
        help="percentage of requests in time from which a run attains its SLO (90)",
    )


def add_class_flag(group: argparse._ActionsContainer) -> None:
    """Add the flag for the harder goal."""
    group.add_argument(
        "--per-class",
        action="store_true",
        help="a run attains only if enough requests of every length class (< 4k, 4-32k, 32-128k, > 128k; of "
        "20 requests or more) meet the SLO and the backlog of work does not grow",
    )


def add_output_flags(group: argparse._ActionsContainer) -> None:
    """Add the flags for the output folder and its format."""
    group.add_argument(
        "--output-dir",
        type=Path,
        metavar="DIR",
        help="folder for results.json, report.html, pictures, traces and logs (a new one in loong-runs)",
    )
    group.add_argument(
        "--json",
        action="store_true",
        help="end the output with one JSON object (on where the output is no terminal)",
    )


def or_auto(parse: Callable[[str], T]) -> Callable[[str], T | None]:
    """Return a parser of a value, or of `auto` for None."""

    def parse_or_auto(text: str) -> T | None:
        return None if text == "auto" else parse(text)

    parse_or_auto.__name__ = getattr(parse, "__name__", "value")  # argparse names it in its errors
    return parse_or_auto
