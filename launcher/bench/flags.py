"""The flags of `loong bench`."""

import argparse
import shlex
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from loong.core.errors import ConfigError
from loong.foreign_json import NOT_JSON
from loong.launcher.bench.chosen_load import DEFAULT_NUM_REQUESTS, MOST_REQUESTS
from loong.launcher.flags import (
    add_class_flag,
    add_goal_flags,
    add_host_tier_flag,
    add_output_flags,
    add_prefix_caching_flag,
    add_workload_flags,
    or_auto,
    positive,
    ratio,
    seconds,
)
from loong.launcher.keys import add_api_key_flags
from loong.launcher.policy_flags import COMPARED_WORDS, policy_names
from loong.workloads.client.backends import FIELDS_OF_THE_LOAD, ServerApi
from loong.workloads.metrics.slo import RULE_NAMES
from loong.workloads.request import SMALLEST_VOCABULARY

T = TypeVar("T")

DEFAULT_SLO = "tight"
DEFAULT_PRECISION = 0.1


def add_server_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags for the servers to measure."""
    group.add_argument(
        "--base-url",
        action="append",
        metavar="[NAME=]URL",
        help="address of an OpenAI-compatible server to measure; may be given repeatedly",
    )
    group.add_argument(
        "--backend",
        action="append",
        choices=[backend.value for backend in ServerApi],
        help="API of the servers; once for all, or once for each --base-url, then each --peer (openai)",
    )
    group.add_argument(
        "--peer",
        nargs="+",
        action="append",
        default=[],
        metavar=("NAME", "URL COMMAND"),
        help="another engine's server to start and measure: COMMAND, one word, starts it so that it answers "
        "at URL; vllm-tpN and vllm-dpN alone start `vllm serve` on N GPUs; may be given repeatedly",
    )
    group.add_argument(
        "--num-gpus",
        action="append",
        default=[],
        metavar="[NAME=]N",
        help="number of GPUs of the server NAME of --base-url or --peer, or of each of them, to report "
        "throughput per GPU (unknown)",
    )
    add_api_key_flags(group)
    _add_started_server_flags(group)


def _add_started_server_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--policy",
        type=policy_names,
        metavar="P,P",
        help="policies to measure, each on a server started here (none with --base-url or --peer, else "
        f"{COMPARED_WORDS})",
    )
    group.add_argument("--model", help="model to serve here, or to ask for at --base-url (the first)")
    group.add_argument(
        "--num-instances", type=int, default=4, help="number of instances of each server started here (4)"
    )
    group.add_argument(
        "--tensor-parallel-size",
        "-tp",
        type=int,
        default=1,
        help="ranks of each instance of servers started here (1)",
    )
    group.add_argument("--device", help="device of servers started here: cpu or cuda (as `loong serve`)")
    group.add_argument(
        "--load-format", help="where weights of servers started here come from; dummy: random (auto)"
    )
    add_prefix_caching_flag(group, is_of_serve=True)
    add_host_tier_flag(group)
    group.add_argument(
        "--extra-server-args",
        type=_flag(_split),
        default=(),
        metavar="=ARGS",
        help="more flags for `loong serve`, as one word: --extra-server-args='--max-model-len 32k'",
    )
    group.add_argument(
        "--start-timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="time limit for a server to become healthy (600)",
    )


def add_load_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags for the load."""
    add_workload_flags(group, is_scale_chosen=True)
    _add_amount_flags(group)
    group.add_argument("--max-concurrency", type=int, metavar="N", help="bound on requests in flight (none)")
    group.add_argument(
        "--num-warmups", type=int, default=4, help="warm-up requests that are not measured (4)"
    )
    group.add_argument(
        "--repeat",
        type=positive,
        default=1,
        metavar="N",
        help="repetitions of each run, with different seeds (1)",
    )
    group.add_argument(
        "--vocab-size",
        type=int,
        default=SMALLEST_VOCABULARY,
        help=f"upper bound on the token ids of random prompts ({SMALLEST_VOCABULARY}, which every model has)",
    )
    group.add_argument(
        "--request-timeout", type=float, default=3600.0, metavar="S", help="time limit of one request (3600)"
    )
    group.add_argument(
        "--extra-body",
        type=_flag(_fields),
        default={},
        metavar="JSON",
        help='more fields of every request: \'{"temperature": 0.7, "frequency_penalty": 0.5}\'',
    )


def _add_amount_flags(group: argparse._ArgumentGroup) -> None:
    lengths = group.add_mutually_exclusive_group()
    lengths.add_argument(
        "--num-requests",
        type=or_auto(int),
        metavar="N",
        help=f"number of requests of each run (auto: what arrives in a minute, at most {MOST_REQUESTS}; "
        f"{DEFAULT_NUM_REQUESTS} if a rate is given)",
    )
    lengths.add_argument(
        "--duration",
        type=seconds,
        metavar="S",
        help="time in which requests arrive at each rate, instead of --num-requests",
    )
    group.add_argument(
        "--request-rate",
        "--rate",
        metavar="R",
        help="requests per second: 2, or 1,2,4, or 2:8:0.5; inf: all at once (auto: the workload's own pace; "
        "if it has none, two thirds of the capacity, or inf with --max-concurrency)",
    )


def add_report_flags(group: argparse._ArgumentGroup) -> None:
    """Add the flags for the SLO and the output."""
    rules = group.add_mutually_exclusive_group()
    rules.add_argument(
        "--slo",
        default=DEFAULT_SLO,
        help=f"SLO rule: {', '.join(RULE_NAMES)}, one of these with other targets such as tight,tpot:10, or "
        f"bounds as for --goodput in one word (default: {DEFAULT_SLO})",
    )
    rules.add_argument(
        "--goodput",
        nargs="+",
        metavar="METRIC:MS",
        help="SLO as bounds in ms on ttft, tpot or e2el: ttft:2000 tpot:50",
    )
    add_goal_flags(group)
    add_class_flag(group)
    group.add_argument(
        "--find-goodput",
        type=ratio,
        nargs="?",
        const=DEFAULT_PRECISION,
        metavar="X",
        help="from --request-rate on, search the highest rate at which enough meet their SLO, to this "
        f"relative precision ({DEFAULT_PRECISION})",
    )
    add_output_flags(group)


def _flag(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return `parse` with its ValueErrors as argparse errors; argparse would replace their messages."""

    def parse_flag(text: str) -> T:
        try:
            return parse(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse_flag


def _fields(text: str) -> dict[str, object]:
    try:
        fields = msgspec.json.decode(text, type=dict[str, object])
    except NOT_JSON as error:
        raise ConfigError(f"{text!r} is not a JSON object: {error}") from error
    if taken := sorted(fields.keys() & FIELDS_OF_THE_LOAD):
        raise ConfigError(f"{', '.join(taken)} cannot be set: the workload or the load generator sets it")
    return fields


def _split(text: str) -> tuple[str, ...]:
    try:
        words: Sequence[str] = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{text!r} cannot be split into words: {error}") from error
    return tuple(words)
