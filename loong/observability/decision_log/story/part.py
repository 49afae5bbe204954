"""The result of a request's part in a batch."""

from collections.abc import Sequence
from dataclasses import dataclass

from loong.core.request import FinishReason
from loong.observability.decision_log.lines import BatchEndedLine, Cause, Chunk, EndedLine
from loong.observability.decision_log.story.index import LogIndex, Ran
from loong.observability.decision_log.story.steps import StoryPart


@dataclass(frozen=True, slots=True)
class Pause:
    """A time in which a request with KV was in no batch, with the batches that ran on its instances."""

    seconds: float
    batch_ids: tuple[int, ...]


def part_of(index: LogIndex, ran: Ran, pauses: Sequence[Pause]) -> StoryPart:
    """Return the part, given the pauses before it."""
    batch, part = ran.batch, ran.part
    until, num_steps = _outcome(index, ran)
    end = index.batch_ends.get(batch.batch_id)
    if isinstance(part, Chunk):
        num_tokens, computed_on, kept_on = part.num_tokens, part.computed_on, part.kept_on
    else:
        num_tokens, computed_on = num_steps, {part.master_id: num_steps}
        kept_on = computed_on
    return StoryPart(
        ran.time,
        until,
        batch_id=batch.batch_id,
        first_position=part.first_position,
        num_tokens=num_tokens,
        computed_on=computed_on,
        kept_on=kept_on,
        num_steps=num_steps,
        max_steps=index.max_steps(batch),
        num_others=batch.num_requests - 1,
        predicted_seconds=batch.predicted_seconds,
        paused_seconds=sum(pause.seconds for pause in pauses),
        paused_for=tuple(batch_id for pause in pauses for batch_id in pause.batch_ids),
        cut_short_by=_cut_short_by(index, ran),
        step_seconds=end.seconds if end is not None and end.num_steps == num_steps else None,
    )


def _outcome(index: LogIndex, ran: Ran) -> tuple[float | None, int]:
    """Return the end of the part (None: not in this log), and its number of steps."""
    batch_id = ran.batch.batch_id
    over = index.batch_ends.get(batch_id) or index.batch_losses.get(batch_id)
    ended = index.ends.get(ran.part.request_id)
    if ended is not None and (over is None or ended.time <= over.time):
        return ended.time, _num_steps_to(ended, ran, index.arrivals[ended.request_id].num_prompt_tokens)
    if isinstance(over, BatchEndedLine):
        return over.time, over.num_steps
    return None if over is None else over.time, 0


def _num_steps_to(ended: EndedLine, ran: Ran, num_prompt_tokens: int) -> int:
    """Return the steps of a request in the batch in which it ended."""
    if isinstance(ran.part, Chunk):
        return 0 if ended.reason is FinishReason.ABORT else 1
    num_before = ran.part.first_position + 1 - num_prompt_tokens
    return max(0, ended.num_output_tokens - num_before)  # one step was predicted, if its batch was lost


def _cut_short_by(index: LogIndex, ran: Ran) -> tuple[Cause, ...]:
    """Return the events for which its lease was ended early, if that had an effect."""
    reported, end = index.lease_ends.get(ran.batch.batch_id), index.batch_ends.get(ran.batch.batch_id)
    if reported is None or end is None or end.num_steps >= index.max_steps(ran.batch):
        return ()
    return reported.causes
