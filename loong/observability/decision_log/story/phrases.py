"""Numbers, sets and causes in words."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized

from loong.core.cluster_history import ChangeKind
from loong.core.decision import DecisionKind
from loong.core.request import FinishReason
from loong.observability.decision_log.lines import Cause, Reason
from loong.observability.decision_log.story.steps import InstanceChange, WaitedFor

MAX_LISTED = 4
MAX_UNEVENNESS = 0.02  # relative difference of counts that are called equal


def duration(seconds: float) -> str:
    """Return seconds with three digits: 0 ms, 1.23 ms, 12.3 ms, 412 ms or 1.23 s."""
    if not seconds:
        return "0 ms"
    value, unit = (seconds, "s") if seconds >= 0.9995 else (1000 * seconds, "ms")
    num_decimals = next((n for n, limit in enumerate((99.95, 9.995)) if value >= limit), 2)
    return f"{value:,.{num_decimals}f} {unit}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: 1 token, 1,234 tokens."""
    return f"{number:,} {noun}" + ("" if number == 1 else "es" if noun.endswith("ch") else "s")


def times(number: int) -> str:
    """Return a number of times: once, twice, 3 times."""
    return {1: "once", 2: "twice"}.get(number, f"{number:,} times")


def verb(plural: str, subjects: Sized) -> str:
    """Return a verb that agrees with the number of subjects."""
    singular = {"are": "is", "have": "has"}.get(plural, f"{plural}s")
    return singular if len(subjects) == 1 else plural


def capital(text: str) -> str:
    """Return the text with a capital letter."""
    return text[:1].upper() + text[1:]


def listed(items: Iterable[object]) -> str:
    """Return a list in words: a, b and c."""
    *most, last = map(str, items)
    return f"{', '.join(most)} and {last}" if most else last


def some_of(items: Sequence[object]) -> str:
    """Return the first items in words: a, b, c, d and 7 more."""
    more = len(items) - MAX_LISTED
    return listed(items) if more <= 1 else listed([*items[:MAX_LISTED], f"{more:,} more"])


def instances(instance_ids: Sequence[int]) -> str:
    """Return instances in words: instance 3; instances 0, 2 and 5; instances 0 to 7."""
    if len(instance_ids) == 1:
        return f"instance {instance_ids[0]}"
    low, high = min(instance_ids), max(instance_ids)
    is_run = len(instance_ids) > MAX_LISTED and high - low == len(instance_ids) - 1
    return f"instances {low} to {high}" if is_run else f"instances {listed(sorted(instance_ids))}"


def batches(batch_ids: Sequence[int]) -> str:
    """Return batches in words: batch 3; batches 3, 5 and 9."""
    return f"batch {batch_ids[0]}" if len(batch_ids) == 1 else f"batches {some_of(batch_ids)}"


def holdings(kv: Mapping[int, int]) -> str:
    """Return KV by instance: instance 2; instances 0 to 7 (about 512 tokens each); instances 0 (512
    tokens) and 1 (64).
    """
    held = {instance_id: kv[instance_id] for instance_id in sorted(kv) if kv[instance_id]}
    if len(held) <= 1:
        return instances(tuple(held))
    least, most = min(held.values()), max(held.values())
    if most - least <= max(1, MAX_UNEVENNESS * most):
        about = "" if least == most else "about "
        return f"{instances(tuple(held))} ({about}{counted(most, 'token')} each)"
    first, *others = held.items()
    shares = [f"{first[0]} ({counted(first[1], 'token')})", *(f"{i} ({n:,})" for i, n in others)]
    return f"instances {listed(shares)}"


def happenings(causes: Sequence[Cause]) -> str:
    """Return the causes of a plan in words, to follow "as". A batch's end includes its requests' ends."""
    over_ids = {cause.batch_id for cause in causes if cause.event == "batch_finished"}
    reported = [c for c in causes if c.event != "tokens_produced" or c.batch_id not in over_ids]
    return some_of(list(map(_cause_words, reported)))


_CHANGES = {
    ChangeKind.LOST: "is lost",
    ChangeKind.JOINED: "joins",
    ChangeKind.DRAINING: "is to leave",
    ChangeKind.LEFT: "leaves",
    ChangeKind.LENT: "lends room",
    ChangeKind.RETURNED: "has room again that it lent",
}


def change_words(changes: Iterable[InstanceChange]) -> Iterator[str]:
    """Yield a sentence on changes of instances during a wait, if there were any."""
    reported = [
        f"instance {change.instance_id} {_CHANGES[change.kind]}" + (f" ({change.why})" if change.why else "")
        for change in changes
    ]
    if reported:
        yield f"Meanwhile {some_of(reported)}."


_ABORTS = {FinishReason.ABORT: "the client of {} leaves", FinishReason.ERROR: "{} fails"}


def _cause_words(cause: Cause) -> str:
    match cause.event:
        case "request_arrived":
            return f"{cause.request_id} arrives"
        case "request_aborted":
            return _ABORTS.get(cause.reason, "the answer to {} is complete").format(cause.request_id)
        case "tokens_produced":
            return f"a request of batch {cause.batch_id} ends"
        case "lease_ending":
            return f"batch {cause.batch_id} has few steps left"
        case "batch_started":
            return f"batch {cause.batch_id} starts"
        case "batch_end_predicted":
            return f"batch {cause.batch_id} is about to end"
        case "batch_finished":
            return f"batch {cause.batch_id} ends"
        case "migration_finished":
            return f"migration {cause.migration_id} ends"
        case "prefix_cache_reset":
            return "the prefix cache is reset"
        case (
            "instance_lost"
            | "instance_joined"
            | "instance_draining"
            | "instance_left"
            | "instance_lent"
            | "instance_returned"
        ):
            kind = ChangeKind(cause.event.removeprefix("instance_"))
            return f"instance {cause.instance_id} {_CHANGES[kind]}"


def difference(measured: float, predicted: float) -> str:
    """Return a difference in words: 4% more than predicted."""
    percent = round(100 * (measured / predicted - 1)) if predicted else 0
    return (
        "as predicted"
        if not percent
        else f"{abs(percent)}% {'more' if percent > 0 else 'less'} than predicted"
    )


SUBJECTS = {
    DecisionKind.DEFER: "its turn",
    DecisionKind.DOP: "DoP",
    DecisionKind.MIGRATE: "moving KV",
    DecisionKind.LEND: "lent room",
    DecisionKind.LOAD: "KV in host memory",
    DecisionKind.COPY: "copying KV",
    DecisionKind.PREEMPT: "preemption",
    DecisionKind.EVICT: "dropping KV",
    DecisionKind.END_LEASE: "ending a lease",
    DecisionKind.FAIL: "failure",
}


def policy_words(reasons: Iterable[Reason]) -> Iterator[str]:
    """Yield the policy's reasons, one sentence each."""
    for reason in reasons:
        if reason.kind is DecisionKind.MISS:
            yield f"Not read from the prefix cache: {reason.chosen}."
            continue
        costs = {weighed.what: weighed.cost for weighed in reason.alternatives}
        others = [f"{what} ({_cost(cost)})" for what, cost in costs.items() if what != reason.chosen]
        chosen = reason.chosen
        if chosen in costs:
            chosen += f" ({_cost(costs[chosen])})"
        rather = f", rather than {listed(others)}" if others else ""
        yield f"The policy on {SUBJECTS.get(reason.kind, reason.kind)}: {chosen}{rather}."


def wait_words(waits: Sequence[WaitedFor]) -> Iterator[str]:
    """Yield the reasons for waiting, the longest first."""
    for wait in waits[:MAX_LISTED]:
        yield f"For {duration(wait.seconds)}: {wait.reason}."
    if others := waits[MAX_LISTED:]:
        seconds = sum(wait.seconds for wait in others)
        yield f"For {duration(seconds)}: {counted(len(others), 'other reason')}."


def _cost(cost: float | None) -> str:
    return "impossible" if cost is None else duration(cost)
