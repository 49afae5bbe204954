"""A decode lease on one instance: each step is asked for before the host knows the last one's tokens."""

import math
from collections.abc import Callable, Iterator
from itertools import count

import torch

from loong.core.events import ProducedToken
from loong.core.instructions import RequestInput, RunBatch
from loong.core.placement import InstanceId
from loong.core.plan import Transfer
from loong.core.request import FinishReason, SamplingParams
from loong.worker.backend import Reading
from loong.worker.decode_steps import BATCH_SIZES, DecodeRow, DecodeSteps
from loong.worker.kv_pool import KVPool

ReportTokens = Callable[[int, tuple[ProducedToken, ...]], None]


class DecodeLease:
    """Runs leases of which the device can take the steps by itself."""

    def __init__(self, instance_id: InstanceId, pool: KVPool, steps: DecodeSteps) -> None:
        self._instance_id, self._pool, self._steps = instance_id, pool, steps

    def can_run(self, command: RunBatch) -> bool:
        """Whether a batch is decode on this instance alone, of tokens that only logits and seeds decide."""
        blocks = command.plan.queries
        return (
            command.plan.group.dop == 1
            and len(blocks) <= BATCH_SIZES[-1]
            and all(len(b.positions) == 1 and b.transfer is Transfer.QUERY for b in blocks)
            and all(_is_plain(given) for given in command.inputs)
        )

    def run(self, command: RunBatch, stop_step: Callable[[], int], report: ReportTokens) -> int:
        """As `BatchRunner.run`. What is computed beyond the end of a request or of the lease is dropped."""
        self._steps.begin([self._row(command, given) for given in command.inputs])
        live = dict(enumerate(command.inputs))
        reading = self._steps.launch()
        num_steps = command.plan.num_steps
        for step in count():
            is_last = step + 1 >= min(num_steps, stop_step())
            following = None if is_last else self._steps.launch()
            if tokens := tuple(_take_tokens(reading, step, live)):
                report(step, tokens)
            if following is None or not live:
                break
            reading = following
        if following is not None:
            following.wait()  # nobody is left, but it writes into slots
        for segment in command.plan.writes:
            self._pool.release_positions(segment.owner_id, segment.positions[step + 1 :])
        return step + 1

    def _row(self, command: RunBatch, given: RequestInput) -> DecodeRow:
        """A request as the lease begins, with slots for all that it may store."""
        request_id, placement, params = given.request_id, given.placement, given.sampling_params
        assert params is not None
        slots = [self._pool.slots(request_id, held) for held in placement.on(self._instance_id)]
        slots += [self._pool.allocate(request_id, s.positions) for s in command.plan.writes_of(request_id)]
        return DecodeRow(given.token_ids[0], placement.num_tokens, torch.cat(slots), params)


def _is_plain(given: RequestInput) -> bool:
    """Whether a decode token needs nothing that the host would have to know of the one before."""
    params: SamplingParams | None = given.sampling_params
    return (
        params is not None
        and not params.has_penalties
        and params.num_logprobs is None
        and given.num_output_tokens >= max(1, params.min_tokens)
    )


def _take_tokens(reading: Reading, step: int, live: dict[int, RequestInput]) -> Iterator[ProducedToken]:
    """The tokens of the live requests, of which those that end with them leave."""
    token_ids, largest = (values.tolist() for values in reading.wait())
    for row, given in list(live.items()):
        params = given.sampling_params
        assert params is not None
        if math.isfinite(largest[row]):
            reason = params.finish_reason(given.num_output_tokens + step + 1, token_ids[row])
            yield ProducedToken(given.request_id, token_ids[row], reason)
        else:
            reason = FinishReason.ERROR
            yield ProducedToken(given.request_id, 0, reason)
        if reason is not None:
            del live[row]
