"""The state of the cluster at a request's arrival, in words."""

from collections.abc import Iterator, Sequence

from loong.observability.decision_log.story.found import Busy, StoryFindings
from loong.observability.decision_log.story.phrases import (
    MAX_LISTED,
    capital,
    counted,
    instances,
    listed,
    some_of,
    verb,
)
from loong.observability.decision_log.story.story import Story

_LONG_SECONDS = 0.001


def arrival_words(story: Story) -> Iterator[str]:
    """Yield sentences on its grammar, the requests before it, the running batches, and the free KV slots."""
    found, num_prompt = story.found, story.summary.num_prompt_tokens
    if (seconds := story.summary.grammar_seconds) >= _LONG_SECONDS:
        yield f"Workers compile its grammar for {seconds:.3f} s, and no plan has it before."
    if story.summary.choice_of is not None:
        yield f"It comes as another choice of {story.summary.choice_of}, which computes the prompt of both."
        return
    if found.ahead:
        ahead = f"{counted(len(found.ahead), 'request')} {verb('wait', found.ahead)}"
        yield f"It comes. {ahead} before it: {some_of(found.ahead)}."
    else:
        yield "It comes, and no request waits before it."
    yield from _occupation(found, story.summary.arrived_at)
    yield _room(found, num_prompt)


def _occupation(found: StoryFindings, came: float) -> Iterator[str]:
    if len(found.busy) > MAX_LISTED:
        yield _many_batches(found.busy, came)
    else:
        for busy in found.busy:
            group = f"{capital(instances(busy.instance_ids))} {verb('run', busy.instance_ids)}"
            yield f"{group} batch {busy.batch_id} ({_phases([busy])}){_until(busy, came)}."
    if found.idle_ids:
        yield f"{capital(instances(found.idle_ids))} {verb('are', found.idle_ids)} idle."
    if leaving := found.draining_ids:
        takes = verb("take", leaving)
        yield f"{capital(instances(leaving))} {verb('are', leaving)} to leave, and {takes} nothing new."
    if lost := found.lost_ids:
        yield f"{capital(instances(lost))} {verb('are', lost)} lost, and not back."


def _room(found: StoryFindings, num_prompt: int) -> str:
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
    """Return the work in words: prefill of 1 request and decode of 2 requests."""
    numbers = {
        "prefill": sum(busy.num_prefills for busy in batches),
        "decode": sum(busy.num_decodes for busy in batches),
    }
    return listed(f"{phase} of {counted(number, 'request')}" for phase, number in numbers.items() if number)


def _until(busy: Busy, came: float) -> str:
    if busy.until is None:
        return ""
    return f" until +{busy.until - came:.3f} s{', as predicted' if busy.is_predicted else ''}"
