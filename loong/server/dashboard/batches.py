"""A batch of the decision log: the work for each request, its duration, and the reasons of its plan."""

from collections.abc import Iterator, Sequence

import msgspec

from loong.core.cost.work import Phase
from loong.core.request import RequestId
from loong.observability.decision_log.lines import LoggedBatch, PlannedLine
from loong.observability.decision_log.story.index import LogIndex
from loong.observability.decision_log.story.phrases import capital, counted, happenings, policy_words


class BatchPart(msgspec.Struct, frozen=True):
    """The part of a request in a batch. Lengths are in tokens, and None if the log no longer has them."""

    id: RequestId
    prompt: int | None
    does: str


class BatchReport(msgspec.Struct, frozen=True):
    """A planned batch. Seconds are of one step, and None stands for unknown."""

    id: int
    phase: Phase
    instances: tuple[int, ...]
    max_steps: int
    num_steps: int | None
    predicted_seconds: float | None
    seconds: float | None
    parts: Sequence[BatchPart]
    why: Sequence[str]
    holders: tuple[int, ...] = ()  # instances outside its group that served it


def report_of_batch(index: LogIndex, batch_id: int) -> BatchReport | None:
    """Return the batch as the log describes it, or None if the log does not have it."""
    if batch_id not in index.batches:
        return None
    plan, batch = index.batches[batch_id]
    end = index.batch_ends.get(batch_id)
    return BatchReport(
        batch_id,
        batch.phase,
        batch.instance_ids,
        index.max_steps(batch),
        None if end is None else end.num_steps,
        batch.predicted_seconds,
        None if end is None else end.seconds,
        list(_parts(index, batch)),
        list(_why(plan, batch)),
        batch.holder_ids,
    )


def _parts(index: LogIndex, batch: LoggedBatch) -> Iterator[BatchPart]:
    def prompt(request_id: RequestId) -> int | None:
        arrived = index.arrivals.get(request_id)
        return None if arrived is None else arrived.num_prompt_tokens

    for chunk in batch.chunks:
        span = f"{chunk.first_position:,} to {chunk.stop_position - 1:,}"
        does = f"prefill of {counted(chunk.num_tokens, 'token')} ({span})"
        if chunk.num_repaired:
            does += f", {chunk.num_repaired:,} of them lost before"
        elif chunk.num_output_tokens:
            does = f"{does}, again"
        yield BatchPart(chunk.request_id, prompt(chunk.request_id), does)
    for decode in batch.decodes:
        does = f"decode from position {decode.first_position:,} on instance {decode.master_id}"
        yield BatchPart(decode.request_id, prompt(decode.request_id), does)


def _why(plan: PlannedLine, batch: LoggedBatch) -> Iterator[str]:
    """Yield the events that caused the plan, and the policy's reasons that name requests of the batch."""
    if plan.causes:
        yield f"{capital(f'planned as {happenings(plan.causes)}')}."
    own = {*(chunk.request_id for chunk in batch.chunks), *(decode.request_id for decode in batch.decodes)}
    yield from policy_words(reason for reason in plan.reasons if own & set(reason.request_ids))
