"""A count of the tokens of each batch that had been computed before."""

from collections.abc import Callable, Iterable

from loong.core.instructions import RequestInput, RunBatch
from loong.core.positions import num_below
from loong.core.request import RequestId


class Recomputed:
    """Counts tokens whose KV existed before, and was dropped or lost with an instance.

    A request with output has computed all but its newest token. For others, the last position is kept here.
    """

    def __init__(self, is_live: Callable[[RequestId], bool]) -> None:
        """Set up. `is_live` returns whether a request has not ended; no others are kept."""
        self._is_live = is_live
        self._stops: dict[RequestId, int] = {}  # of requests in their first prefill

    def count(self, batch: RunBatch, prefilled: Iterable[RequestInput]) -> int:
        """Return the tokens of a finished batch that were computed again; `prefilled` are its prefills."""
        total = 0
        for given in prefilled:
            request_id, num_outputs = given.request_id, given.num_output_tokens
            blocks = [block.positions for block in batch.plan.blocks_of(request_id)]
            known = self._stops.pop(request_id, 0)
            if num_outputs:
                known = given.num_prompt_tokens + num_outputs - 1
            total += num_below(blocks, known)
            is_unfinished = given.sampling_params is None and not num_outputs
            if is_unfinished and blocks and self._is_live(request_id):
                self._stops[request_id] = max(known, *[positions[-1] + 1 for positions in blocks])
        return total

    def forget(self, request_id: RequestId) -> None:
        """Forget a request that has ended."""
        self._stops.pop(request_id, None)
