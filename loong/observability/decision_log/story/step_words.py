"""The steps of a request in words."""

from collections import Counter
from collections.abc import Iterator
from typing import assert_never

from loong.core.plan import PreemptionReason
from loong.core.request import FinishReason
from loong.observability.decision_log.story.found import StoryFindings
from loong.observability.decision_log.story.phrases import (
    batches,
    change_words,
    counted,
    duration,
    happenings,
    holdings,
    listed,
    policy_words,
    some_of,
    verb,
    wait_words,
)
from loong.observability.decision_log.story.run_words import run_words
from loong.observability.decision_log.story.steps import (
    ComputedBatches,
    Drain,
    Drop,
    End,
    Evict,
    First,
    Loss,
    Move,
    StoryStep,
    Wait,
)
from loong.observability.decision_log.story.story import Story
from loong.observability.decision_log.story.summary import Latency

_PREEMPTED = {
    PreemptionReason.NO_ROOM: "others need its room, and it came last",
    PreemptionReason.TOO_LONG: "its group can never hold all of it",
    PreemptionReason.REPAIR: "there is no room to compute KV again that was lost",
    PreemptionReason.CHANGED_ROLES: "its KV is on instances for prompts and on instances for decodes",
}
_ENDS = {
    FinishReason.LENGTH: "It ends with {}, all that it may have.",
    FinishReason.STOP: "Its answer is complete, after {}.",
    FinishReason.ABORT: "Its client leaves, after {}.",
}


def step_words(step: StoryStep, story: Story) -> Iterator[str]:
    """Yield sentences on a step, and the policy's reasons for it."""
    match step:
        case Wait():
            yield from _wait(step, story)
            yield from policy_words(step.reasons)
        case ComputedBatches():
            yield from run_words(step)
            yield from policy_words(step.reasons)
        case Move():
            yield _move(step, story.found)
            yield from policy_words(step.reasons)
        case Drop():
            kv = f"{counted(sum(step.kv.values()), 'token')} on {holdings(step.kv)}"
            yield f"It is preempted, as {_PREEMPTED[step.reason]}."
            yield f"Its KV, {kv}, is dropped, to be computed again."
            room = f"{step.kv_free:,} of {step.kv_capacity:,} tokens of KV were free"
            if others := step.batch_ids:
                room += f"; {batches(others)} {verb('start', others)} there"
            yield f"{room}."
            yield from policy_words(step.reasons)
        case Evict():
            num_evicted = sum(step.kv.values())
            kv = f"{num_evicted:,} of its {counted(num_evicted + step.num_kept, 'token')}"
            yield f"KV on {holdings(step.kv)}, {kv}, is dropped, to be computed again."
            yield from policy_words(step.reasons)
        case Loss():
            why = f" ({step.why})" if step.why else ""
            total = counted(step.num_lost + step.num_kept, "token")
            kv = f"with {step.num_lost:,} of {total} of KV" if step.num_kept else "with all KV"
            yield f"Instance {step.instance_id} is lost{why}, {kv} of this request."
            if step.num_lost:
                are = verb("are", range(step.num_lost))
                yield f"{counted(step.num_lost, 'token')} {are} to be computed again."
        case Drain():
            total = counted(step.num_held + step.num_elsewhere, "token")
            kv = f"{step.num_held:,} of {total}" if step.num_elsewhere else "all"
            yield f"Instance {step.instance_id} is to leave: {kv} of this request's KV must go elsewhere."
        case First():
            yield f"Its first token, {duration(step.ttft)} after it came{_margin(story.summary.ttft)}."
        case End():
            num_tokens = counted(step.num_output_tokens, "token")
            yield _ENDS.get(step.reason, "It fails, after {}.").format(num_tokens)
        case _:
            assert_never(step)


def submitted_at(step: StoryStep, story: Story) -> float:
    """Return the time of a step in the story: the end of a wait, and the beginning of other steps."""
    if isinstance(step, Wait):
        return story.log_ends_at if step.until is None else step.until
    return step.time


def _wait(wait: Wait, story: Story) -> Iterator[str]:
    if wait.until is None:
        yield f"It still waits when the log ends, {duration(story.log_ends_at - wait.time)} by then."
    elif not wait.causes:
        yield f"It has waited {duration(wait.until - wait.time)}, and never starts."
    else:
        arrived_ids = [cause.request_id for cause in wait.causes if cause.event == "request_arrived"]
        is_first = story.summary.request_id in arrived_ids
        when = "with the first plan after its arrival" if is_first else f"as {happenings(wait.causes)}"
        yield f"Having waited {duration(wait.until - wait.time)}, it starts {when}."
        yield f"{wait.kv_free:,} tokens of KV are free by now."
    yield from wait_words(wait.waited_for)
    yield from change_words(wait.changes)
    if wait.time == story.summary.arrived_at and (others := story.found.overtaken_by):
        yield f"{some_of(others)}, which came later, {verb('have', others)} started before it."


def _move(move: Move, found: StoryFindings) -> str:
    def name(instance_id: int) -> str:
        if instance_id in found.host_ids:
            return f"host tier {instance_id}"
        return f"{'memory instance' if instance_id in found.memory_ids else 'instance'} {instance_id}"

    num_tokens: Counter[tuple[int, int]] = Counter()
    for route in move.routes:
        num_tokens[route.source_id, route.destination_id] += route.num_tokens
    routes = listed(
        f"{counted(number, 'token')} from {name(source_id)} to {name(destination_id)}"
        for (source_id, destination_id), number in num_tokens.items()
    )
    if move.until is None:
        return f"KV moves, {routes}; it is under way when the log ends."
    took = duration(move.until - move.time)
    if move.is_committed:
        return f"KV moves, {routes}, in {took}."
    return f"KV is to move, {routes}, but that fails after {took} and all stays where it was."


def _margin(ttft: Latency) -> str:
    if ttft.slo is None or ttft.seconds is None:
        return ""
    margin, side = abs(ttft.seconds - ttft.slo), "over" if ttft.is_late else "within"
    return f": {side} its SLO by {duration(margin)}"
