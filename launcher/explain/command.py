"""`loong explain`: flags and output."""

import argparse
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import msgspec

from loong.core.errors import ConfigError
from loong.core.request import RequestId
from loong.launcher.explain.chosen_log import ChosenLog, chosen_log
from loong.launcher.explain.listing import (
    beginnings,
    most_delayed_first,
    overview,
    table,
    waited_for,
)
from loong.observability.decision_log.reader import read_log
from loong.observability.decision_log.story.index import LogIndex, indexed
from loong.observability.decision_log.story.loans import loan_words, loans_of, room_words
from loong.observability.decision_log.story.phrases import capital, counted, wait_words
from loong.observability.decision_log.story.story import story_of
from loong.observability.decision_log.story.summary import Summary, summary_of
from loong.observability.decision_log.story.words import reported, steps_took, why_it_waited

NUM_WORST = 10
NUM_WAITS = 2  # of one of these, where the policy gave no reasons
MAX_NAMED = 3  # of the ids that begin alike
_EXAMPLES = """\
examples:
  loong explain                                      # of the newest run here: who waited, and for what
  loong explain --policy static-sp                   # the same of another policy of that run
  loong explain --request cmpl-1f3                   # one request's story
  loong explain decisions.jsonl --all                # every request of a log of `loong serve --decision-log`
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command `explain` and its flags."""
    parser = subparsers.add_parser(
        "explain",
        help="explain from a decision log why requests waited, where they ran, and how long it took",
        description="Explain the last run of a decision log: what its requests waited for, and the ten that "
        "waited longest; or one request.",
        epilog=_EXAMPLES,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "log",
        nargs="?",
        type=Path,
        metavar="LOG",
        help="decision log of --decision-log, or folder of a run of `loong bench` (the newest here)",
    )
    parser.add_argument("--policy", metavar="NAME", help="policy of the run to explain (its first)")
    parser.add_argument(
        "--request", metavar="ID", help="explain one request, named by its API id or the beginning of the id"
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="list every request without reasons, also those of a benchmark's warm-up and probe",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")


def run(args: argparse.Namespace) -> int:
    """Print the list, or the story, and return 0. Raises `ConfigError` if the log has no request."""
    log = chosen_log(args.log, args.policy)
    index = indexed(read_log(log.path))
    if not index.arrivals:
        raise ConfigError(f"{log.path} has no request: none has arrived")
    if args.request is not None:
        print(_story(index, log.path, args))
    else:
        print(_list(index, log, is_whole=args.all, as_json=args.json))
    return 0


def _list(index: LogIndex, log: ChosenLog, *, is_whole: bool, as_json: bool) -> str:
    measured = [i for i in index.arrivals if i in log.measured_ids]
    chosen = index.arrivals if is_whole or not measured else measured
    summaries = most_delayed_first([summary_of(index, request_id) for request_id in chosen])
    if as_json:
        found = {
            "log": str(log.path),
            "policy": log.policy or index.policy,
            "requests": summaries,
            "loans": loans_of(index),
        }
        return msgspec.json.encode(found).decode()
    loans = (*loan_words(loans_of(index)), *room_words(index))
    lines = [*_title(index, log, len(summaries)), "", *overview(summaries), *loans, ""]
    shown = summaries if is_whole else summaries[:NUM_WORST]
    if len(shown) < len(summaries):
        lines += [f"The {len(shown)} that waited longest, each with its reasons:", ""]
    if is_whole:
        return "\n".join([*lines, *table(shown)])
    names = beginnings(index.arrivals)
    lines += table(shown, [names[s.request_id] for s in shown], [_reasons(index, s) for s in shown])
    lines += ["", f"One request in full: loong explain {log.path} --request {names[shown[0].request_id]}"]
    if len(shown) < len(index.arrivals):
        lines.append(f"All requests: loong explain {log.path} --all")
    return "\n".join(lines)


def _title(index: LogIndex, log: ChosenLog, num_listed: int) -> Iterator[str]:
    policy = log.policy or index.policy
    of_policy = f" of policy {policy}" if policy else ""
    yield f"{counted(num_listed, 'request')}{of_policy}, from {log.path}"
    if num_others := len(index.arrivals) - num_listed:
        yield f"Left out: {counted(num_others, 'request')} of the warm-up and the probe."
    if log.others:
        yield f"Also there: {', '.join(log.others)}"


def _reasons(index: LogIndex, summary: Summary) -> Sequence[str]:
    """Return sentences on the policy's reasons to wait, or else on the longest waits, and on the steps."""
    why = [*wait_words(waited_for(summary))]
    if not summary.waited_for:
        why = [*islice(why_it_waited(story_of(index, summary.request_id)), NUM_WAITS)]
    return *why, *(f"{capital(words)}." for words in steps_took(summary))


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
