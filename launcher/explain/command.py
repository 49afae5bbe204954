"""`loong explain`: flags and output."""

import argparse
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from loong.core.errors import ConfigError
from loong.core.request import RequestId
from loong.launcher.explain.listing import listing, most_delayed_first
from loong.launcher.runs.run_document import FILE_NAME
from loong.launcher.runs.run_folder import logs_beside, newest_decision_log
from loong.observability.decision_log.reader import read_log
from loong.observability.decision_log.story.index import LogIndex, indexed
from loong.observability.decision_log.story.phrases import counted
from loong.observability.decision_log.story.story import story_of
from loong.observability.decision_log.story.summary import summary_of
from loong.observability.decision_log.story.words import reported
from loong.workloads.report.run_document import read_document

MAX_NAMED = 3  # of the ids that begin alike
_EXAMPLES = """\
examples:
  loong serve --decision-log decisions.jsonl         # write a log
  loong explain                                      # the newest log in this folder, as of `loong bench`
  loong explain decisions.jsonl                      # all requests, most delayed first
  loong explain decisions.jsonl --request cmpl-1f3   # one request's story
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command `explain` and its flags."""
    parser = subparsers.add_parser(
        "explain",
        help="explain from a decision log why requests waited, where they ran, and how long it took",
        description="Explain the last run of a decision log: all requests, or one.",
        epilog=_EXAMPLES,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "log",
        nargs="?",
        type=Path,
        metavar="LOG",
        help="decision log, as written by --decision-log or `loong bench` (the newest in this folder)",
    )
    parser.add_argument(
        "--request", metavar="ID", help="explain one request, named by its API id or the beginning of the id"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")


def run(args: argparse.Namespace) -> int:
    """Print the list, or the story, and return 0. Raises `ConfigError` if the log has no request."""
    log = args.log or newest_decision_log()
    if args.log is None:
        print(f"Of {log}{_more_of(log)}:", file=sys.stderr)
    index = indexed(read_log(log))
    if not index.arrivals:
        raise ConfigError(f"{log} has no request: none has arrived")
    print(_list(index, as_json=args.json) if args.request is None else _story(index, log, args))
    return 0


def _more_of(log: Path) -> str:
    """Return what a reader who named no log must know of the one that was found, to follow its name."""
    num_measured = 0
    with suppress(ConfigError):  # no document that can be read
        runs = (run for run in read_document(log.with_name(FILE_NAME)).runs if run.decision_log == log.name)
        num_measured = sum(run.num_prompts + run.num_unfinished for run in runs)
    words = f", of which {counted(num_measured, 'request')} were to be measured" if num_measured else ""
    others = logs_beside(log)
    return words + (f"; other logs there: {', '.join(others)}" if others else "")


def _list(index: LogIndex, *, as_json: bool) -> str:
    summaries = most_delayed_first([summary_of(index, request_id) for request_id in index.arrivals])
    if as_json:
        return msgspec.json.encode({"requests": summaries}).decode()
    return listing(summaries)


def _story(index: LogIndex, log: Path, args: argparse.Namespace) -> str:
    story = story_of(index, _request_id(index, log, args.request))
    return msgspec.json.encode(story).decode() if args.json else reported(story)


def _request_id(index: LogIndex, log: Path, text: str) -> RequestId:
    """Return the request that has this id, or the only one whose id begins with it."""
    if text in index.arrivals:
        return text
    matching = [request_id for request_id in index.arrivals if request_id.startswith(text)]
    if not matching:
        raise ConfigError(
            f"{log} has {len(index.arrivals):,} requests, but not {text!r}; without --request it lists them"
        )
    if len(matching) > 1:
        some = ", ".join(matching[:MAX_NAMED]) + (", ..." if len(matching) > MAX_NAMED else "")
        raise ConfigError(f"--request {text} is how {len(matching):,} ids begin: {some}")
    return matching[0]
