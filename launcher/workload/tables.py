"""The output of `loong workload describe`: tables for people, and a line of JSON for programs."""

from collections.abc import Sequence

import msgspec

from loong.workloads.report.describe import QUANTILES, Description, Spread, describe
from loong.workloads.report.report import table
from loong.workloads.request import WorkloadRequest
from loong.workloads.workload import origin_of


def print_description(
    workload: str,
    requests: Sequence[WorkloadRequest],
    seed: int,
    length_scale: float,
    max_concurrency: int | None = None,
) -> None:
    """Print the description of at least one request; `max_concurrency` is of a closed loop."""
    description = describe(requests, length_scale=length_scale)
    print(_heading(workload, description, seed, length_scale, max_concurrency))
    print(_spreads(description), end="\n\n")
    print(_buckets(description), end="\n\n")
    print(_totals(description), end="\n\n")
    settings = {"workload": workload, "seed": seed, "length_scale": length_scale}
    print(msgspec.json.encode({**settings, **msgspec.to_builtins(description)}).decode())


def _heading(
    workload: str, description: Description, seed: int, length_scale: float, max_concurrency: int | None
) -> str:
    pace = "all at once" if max_concurrency is None else f"at most {max_concurrency:,} at once"
    if description.request_rate is not None:
        pace = f"in {description.duration:,.1f} s, {description.request_rate:.4g} a second"
    return (
        f"Workload: {workload} ({origin_of(workload)}, scale {length_scale:g}, seed {seed})\n"
        f"{description.num_requests:,} requests {pace}\n"
    )


def _spreads(description: Description) -> str:
    rows = [
        _spread("input tokens", description.input, ",.0f"),
        _spread("output tokens", description.output, ",.0f"),
    ]
    if description.gap is not None:
        rows.append(_spread("seconds between", description.gap, ",.3f"))
    return table(("", "mean", "std", "min", *map(str.upper, QUANTILES), "max"), rows)


def _spread(name: str, spread: Spread, form: str) -> tuple[str, ...]:
    numbers = (spread.mean, spread.std, spread.min, *spread.quantiles.values(), spread.max)
    return (name, *(format(number, form) for number in numbers))


def _buckets(description: Description) -> str:
    num_input = sum(bucket.num_input_tokens for bucket in description.buckets)
    rows = [
        (
            bucket.name,
            f"{bucket.num_requests:,}",
            _percent(bucket.num_requests, description.num_requests),
            f"{bucket.num_input_tokens:,}",
            _percent(bucket.num_input_tokens, num_input),
            f"{bucket.num_output_tokens:,}",
            _percent(bucket.num_shared_tokens, bucket.num_input_tokens),
        )
        for bucket in description.buckets
    ]
    header = ("input length", "requests", "% of all", "input tokens", "% of all", "output tokens", "% shared")
    return table(header, rows)


def _totals(description: Description) -> str:
    num_input = sum(bucket.num_input_tokens for bucket in description.buckets)
    num_output = sum(bucket.num_output_tokens for bucket in description.buckets)
    rows = [
        ("tokens, input and output", f"{num_input + num_output:,}"),
        ("prompts that begin as one before them", f"{description.num_sharing:,}"),
        ("input tokens in such beginnings", f"{description.num_shared_tokens:,}"),
        ("KV tokens of the longest request", f"{description.most_kv_tokens:,}"),
        ("KV tokens of all requests at once", f"{description.num_kv_tokens:,}"),
        ("the same with shared beginnings once", f"{description.num_unique_kv_tokens:,}"),
    ]
    if description.num_users:
        rows.append(("users", f"{description.num_users:,}"))
    return table(("in all", ""), rows)


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"
