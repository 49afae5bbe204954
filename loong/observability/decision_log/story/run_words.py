"""A run of batches in words."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from loong.core.cost.work import Phase
from loong.observability.decision_log.story.phrases import (
    batches,
    counted,
    difference,
    duration,
    happenings,
    holdings,
    instances,
    some_of,
    times,
    verb,
    wait_words,
)
from loong.observability.decision_log.story.steps import ComputedBatches, StoryPart


def run_words(run: ComputedBatches) -> Iterator[str]:
    """Yield sentences on the work, its instances, its duration, and the place of its KV."""
    dop = f"DoP {len(run.instance_ids)}"
    if run.phase is Phase.PREFILL:
        dop += f" of {run.num_idle} idle"
    group = f"{instances(run.instance_ids)} ({dop})"
    if run.holder_ids:
        group += f", with KV served by {instances(run.holder_ids)}"
    if run.cached:
        num_tokens = sum(run.cached.values())
        are = verb("are", range(num_tokens))
        yield f"{counted(num_tokens, 'token')} {are} in the prefix cache, on {holdings(run.cached)}."
    yield f"{_what(run)} on {group}{_others(run)}: {_time(run)}."
    yield from _scaling(run)
    if len(run.instance_ids) > 1 and (kept_on := _sum(part.kept_on for part in run.parts)):
        yield f"{_where_kv_stays(run, kept_on)}."
    yield from rest_words(run)
    yield from _early_ends(run)


def _scaling(run: ComputedBatches) -> Iterator[str]:
    """Yield sentences on the change of its group."""
    joining, leaving = (instances(ids) if ids else "" for ids in (run.joined_ids, run.left_ids))
    joins, leaves = verb("join", run.joined_ids), verb("leave", run.left_ids)
    if joining and leaving:
        yield f"The group changes: {joining} {joins}, {leaving} {leaves}."
    elif joining:
        yield f"Scale-up: {joining} {joins} the group, for which no KV moves."
    elif leaving and not set(run.left_ids).isdisjoint(run.holder_ids):
        yield f"Hand-over: {leaving} {leaves} the group, whose KV stays there."
    elif leaving:
        yield f"Scale-down: {leaving} {leaves} the group, and no KV stays there."


def _what(run: ComputedBatches) -> str:
    num_tokens = sum(part.num_tokens for part in run.parts)
    if run.phase is Phase.DECODE:
        is_leased = any(part.max_steps > 1 for part in run.parts)
        num_batches = counted(len(run.parts), "lease" if is_leased else "batch")
        return f"Decode of {counted(num_tokens, 'token')} in {num_batches}"
    if run.num_repaired:
        repair = f"Repair of {counted(run.num_repaired, 'lost token')}"
        num_others = num_tokens - run.num_repaired
        return f"{repair} and prefill of {num_others:,} more" if num_others else repair
    first = run.parts[0].first_position
    span = f"{counted(num_tokens, 'token')} ({first:,} to {first + num_tokens - 1:,})"
    again = " again" if run.is_recomputed else ""
    return f"Prefill{again} of {span} {_chunks(run.parts)}"


def _chunks(parts: tuple[StoryPart, ...]) -> str:
    sizes = sorted({part.num_tokens for part in parts})
    if len(parts) == 1:
        return "in one chunk"
    size = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
    return f"in {counted(len(parts), 'chunk')} of {size}"


def _others(run: ComputedBatches) -> str:
    num_others = [part.num_others for part in run.parts]
    if not max(num_others):
        return ""
    up_to = "up to " if min(num_others) < max(num_others) else ""
    return f", with {up_to}{counted(max(num_others), 'other request')}"


def _time(run: ComputedBatches) -> str:
    """Return the duration of the ended steps, with its prediction."""
    done = [part for part in run.parts if part.num_steps]
    if not done:
        return "not done when the log ends" if run.parts[-1].until is None else "cut off"
    seconds, num_steps = sum(part.seconds for part in done), sum(part.num_steps for part in done)
    took = f"{duration(seconds / num_steps)} a token" if run.phase is Phase.DECODE else duration(seconds)
    if all(part.predicted_seconds is not None for part in done):
        predicted = sum(part.num_steps * (part.predicted_seconds or 0.0) for part in done)
        took += f", {difference(seconds, predicted)}"
    return took


def _where_kv_stays(run: ComputedBatches, kept_on: Mapping[int, int]) -> str:
    computed_on = _sum(part.computed_on for part in run.parts)
    if run.phase is Phase.DECODE:
        return f"New KV goes to {holdings(kept_on)}"
    keeping = f"Its KV stays on {holdings(kept_on)}"
    if not (others := sorted(computed_on.keys() - kept_on.keys())):
        alone = (
            f", which {verb('compute', computed_on)} it" if len(computed_on) < len(run.instance_ids) else ""
        )
        return keeping + alone
    return f"{keeping}; {instances(others)} {verb('compute', others)} without keeping any"


def rest_words(run: ComputedBatches) -> Iterator[str]:
    """Yield sentences on the pause before it, if there was one."""
    if paused := [part for part in run.parts if part.paused_seconds]:
        others = [batch_id for part in paused for batch_id in part.paused_for]
        meanwhile = f", while {batches(others)} {verb('run', others)} where its KV is" if others else ""
        seconds = sum(part.paused_seconds for part in paused)
        yield f"It rests {times(len(paused))} before a batch, {duration(seconds)} in all{meanwhile}."
        yield from wait_words(run.waited_for)


def _early_ends(run: ComputedBatches) -> Iterator[str]:
    cuts = [part.cut_short_by for part in run.parts if part.cut_short_by]
    if cuts:
        causes = some_of([f"as {happenings(causes)}" for causes in cuts])
        yield f"{counted(len(cuts), 'lease')} {verb('end', cuts)} early: {causes}."
    if run.parts[0].num_steps and run.parts[-1].until is None:
        yield "The last of these is not done when the log ends."


def _sum(holdings: Iterable[Mapping[int, int]]) -> Counter[int]:
    total: Counter[int] = Counter()
    for held in holdings:
        total.update(held)
    return +total
