"""What a request found, and each of its steps, in words."""

from collections.abc import Collection, Iterator, Sequence
from typing import assert_never

from loong.launcher.explain.found import Busy, Found
from loong.launcher.explain.phrases import (
    MAX_LISTED,
    batches,
    capital,
    counted,
    duration,
    happening,
    holdings,
    instances,
    listed,
    policy_words,
    some_of,
    verb,
)
from loong.launcher.explain.run_words import run_words
from loong.launcher.explain.steps import Drop, End, First, Loss, Move, Run, Step, Wait
from loong.launcher.explain.story import Story
from loong.launcher.explain.summary import Latency

_ENDS = {
    "length": "It ends with {}, all that it may have.",
    "stop": "It ends by itself, after {}.",
    "abort": "Its client leaves, after {}.",
}


def arrival_words(story: Story) -> Iterator[str]:
    """Who was before it, who ran where, and how much room there was."""
    found, num_prompt = story.found, story.summary.num_prompt_tokens
    if found.ahead:
        ahead = f"{counted(len(found.ahead), 'request')} {verb('wait', found.ahead)}"
        yield f"It comes. {ahead} before it: {some_of(found.ahead)}."
    else:
        yield "It comes, and no request waits before it."
    yield from _occupation(found, story.summary.arrived_at)
    yield _room(found, num_prompt)


def step_words(step: Step, story: Story) -> Iterator[str]:
    """What happens, and what the policy says of it."""
    match step:
        case Wait():
            yield from _wait(step, story)
            yield from map(policy_words, step.reasons)
        case Run():
            yield from run_words(step)
            yield from map(policy_words, step.reasons)
        case Move():
            yield _move(step, story.found.host_ids)
            yield from map(policy_words, step.reasons)
        case Drop():
            kv = f"{counted(sum(step.kv.values()), 'token')} on {holdings(step.kv)}"
            yield f"It is preempted: its KV, {kv}, is dropped, to be computed again."
            room = f"{step.kv_free:,} of {step.kv_capacity:,} tokens of KV were free"
            start = (
                f"; {batches(step.batch_ids)} {verb('start', step.batch_ids)} there" if step.batch_ids else ""
            )
            yield f"{room}{start}."
            yield from map(policy_words, step.reasons)
        case Loss():
            why = f" ({step.why})" if step.why else ""
            yield f"Instance {step.instance_id} is lost{why}, and all KV of this request with it."
        case First():
            yield f"Its first token, {duration(step.ttft)} after it came{_margin(story.summary.ttft)}."
        case End():
            num_tokens = counted(step.num_output_tokens, "token")
            yield _ENDS.get(step.reason, "It fails, after {}.").format(num_tokens)
        case _:
            assert_never(step)


def told_at(step: Step, story: Story) -> float:
    """When to tell of a step: a wait at its end, all else at its beginning."""
    if isinstance(step, Wait):
        return story.log_ends_at if step.until is None else step.until
    return step.time


def _occupation(found: Found, came: float) -> Iterator[str]:
    if len(found.busy) > MAX_LISTED:
        yield _many_batches(found.busy, came)
    else:
        for busy in found.busy:
            group = f"{capital(instances(busy.instance_ids))} {verb('run', busy.instance_ids)}"
            yield f"{group} batch {busy.batch_id} ({_phases([busy])}){_until(busy, came)}."
    if found.idle_ids:
        yield f"{capital(instances(found.idle_ids))} {verb('are', found.idle_ids)} idle."


def _room(found: Found, num_prompt: int) -> str:
    most = f"up to {found.most_kv_free:,} on one instance"
    room = f"{found.kv_free:,} of {found.kv_capacity:,} tokens of KV are free ({most})"
    if found.kv_free < num_prompt:
        return f"There is no room for it: {room}, and its prompt needs {num_prompt:,}."
    if found.kv_free < num_prompt + found.ahead_tokens:
        needed = f"the prompts before it need {found.ahead_tokens:,}, and its own {num_prompt:,}"
        return f"There is no room for all: {room}, {needed}."
    return f"There is room: {room}, and its prompt needs {num_prompt:,}."


def _many_batches(batches: Sequence[Busy], came: float) -> str:
    instance_ids = [instance_id for busy in batches for instance_id in busy.instance_ids]
    ends = sorted((busy for busy in batches if busy.until is not None), key=lambda busy: busy.until or 0.0)
    span = f", the first{_until(ends[0], came)}, the last{_until(ends[-1], came)}" if ends else ""
    return f"{capital(instances(instance_ids))} run {len(batches)} batches ({_phases(batches)}){span}."


def _phases(batches: Sequence[Busy]) -> str:
    """What is computed: prefill of 1 request and decode of 2 requests."""
    numbers = {
        "prefill": sum(busy.num_prefills for busy in batches),
        "decode": sum(busy.num_decodes for busy in batches),
    }
    return listed(f"{phase} of {counted(number, 'request')}" for phase, number in numbers.items() if number)


def _until(busy: Busy, came: float) -> str:
    if busy.until is None:
        return ""
    return f" until +{busy.until - came:.3f} s{', as predicted' if busy.is_predicted else ''}"


def _wait(wait: Wait, story: Story) -> Iterator[str]:
    if wait.until is None:
        yield f"It still waits when the log ends, {duration(story.log_ends_at - wait.time)} by then."
    elif wait.cause is None:
        yield f"It has waited {duration(wait.until - wait.time)}, and never starts."
    else:
        yield f"Having waited {duration(wait.until - wait.time)}, it starts as {happening(wait.cause)}."
        yield f"{wait.kv_free:,} tokens of KV are free by now."
    if wait.time == story.summary.arrived_at and (others := story.found.overtaken_by):
        yield f"{some_of(others)}, which came later, {verb('have', others)} started before it."


def _move(move: Move, host_ids: Collection[int]) -> str:
    def name(instance_id: int) -> str:
        return f"{'host tier' if instance_id in host_ids else 'instance'} {instance_id}"

    routes = listed(
        f"{counted(route.num_tokens, 'token')} from {name(route.source_id)} to {name(route.destination_id)}"
        for route in move.routes
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
