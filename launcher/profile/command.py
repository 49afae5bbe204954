"""`loong profile`: flags."""

import argparse
from pathlib import Path

from loong.launcher.cluster_flags import add_instance_flags, add_model_flags, chosen_cluster
from loong.launcher.flags import positive, seconds, token_count
from loong.profiling.scenarios import Limits
from loong.runs.outputs import check_file, sole_writer

_EXAMPLES = """\
examples:
  loong profile --output tiny.json
  loong profile ./Llama-3.1-8B --num-instances 2 -tp 2 --output llama.json
  loong profile llama-3.1-8b --load-format dummy --device cuda --num-instances 1 --max-chunk-tokens 8192 \\
      --max-decode-requests 256 --max-prompt-time 1.5
  loong serve --cost-model tiny.json
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command `profile` and its flags."""
    parser = subparsers.add_parser(
        "profile",
        help="measure workers and fit the cost model to them",
        description="Measure every kind of work on real workers, fit the cost model, and write it to a file. "
        "Where instances attend for others, it also measures how long a step waits for one that computes.",
        epilog=_EXAMPLES,
    )
    parser.set_defaults(run=run)
    add_model_flags(parser.add_argument_group("model"))
    add_instance_flags(parser.add_argument_group("cluster"))
    _add_profile_flags(parser.add_argument_group("profile"))


def run(args: argparse.Namespace) -> int:
    """Measure, report and write the file; return 0 if that worked."""
    from loong.launcher.profile.session import profile  # imports torch, which `--help` can do without

    check_file("--output", args.output)
    limits = Limits(
        max_chunk_tokens=args.max_chunk_tokens,
        max_prompt_tokens=args.max_prompt_tokens,
        max_decode_requests=args.max_decode_requests,
        max_prompt_seconds=args.max_prompt_time,
    )
    with sole_writer("--output", args.output):
        profile(chosen_cluster(args, args.start_timeout), limits, args.duration, args.output)
    return 0


def _add_profile_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--output",
        type=Path,
        default=Path("cost-model.json"),
        metavar="FILE",
        help="file to write the cost model to (%(default)s)",
    )
    group.add_argument(
        "--duration",
        type=seconds,
        default=120.0,
        metavar="S",
        help="duration of the measurement, in seconds, after a round that warms up; each kind of step runs "
        "once in any case, which takes longer on slow machines (%(default)g)",
    )
    _add_limit_flags(group)
    group.add_argument(
        "--start-timeout",
        type=seconds,
        default=600.0,
        metavar="S",
        help="time limit for each start of a worker, which loads weights (%(default)g)",
    )


def _add_limit_flags(group: argparse._ArgumentGroup) -> None:
    limits = Limits()
    group.add_argument(
        "--max-chunk-tokens",
        type=token_count,
        default=limits.max_chunk_tokens,
        metavar="N",
        help="largest prefill step to measure, in tokens of an instance (%(default)s)",
    )
    group.add_argument(
        "--max-prompt-tokens",
        type=token_count,
        default=limits.max_prompt_tokens,
        metavar="N",
        help="longest prompt to measure, if an instance has room for it (%(default)s)",
    )
    group.add_argument(
        "--max-decode-requests",
        type=positive,
        default=limits.max_decode_requests,
        metavar="N",
        help="largest decode step to measure, in requests (%(default)s)",
    )
    group.add_argument(
        "--max-prompt-time",
        type=seconds,
        default=limits.max_prompt_seconds,
        metavar="S",
        help="longest prefill time of the requests of a decode step, predicted by the roofline (%(default)g)",
    )
