"""Leases of groups that change, as commands for instances without an engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from plans import decode, prefill
from requests_for_tests import expected, greedy_request, random_prompt

from loong.core.instructions import ReleaseKV, RunBatch
from loong.core.placement import InstanceId
from loong.core.plan import BatchPlan
from loong.state.live_request import LiveRequest

PROMPTS = tuple(random_prompt(length, seed=length) for length in (14, 7, 20, 9))
NO_PARAMS: Mapping[str, object] = {}
NUM_TOKENS = 20  # of each request, at most


@dataclass(frozen=True, slots=True)
class Lease:
    """A group, the master of each request, and how many steps it takes."""

    group: tuple[InstanceId, ...]
    masters: tuple[InstanceId, ...]
    num_steps: int


class LeaseScript:
    """Greedy requests and their instructions, as from an engine that knows their tokens."""

    def __init__(
        self,
        folder: Path,
        group: tuple[InstanceId, ...],
        lengths: Sequence[int],
        params: Mapping[str, object] = NO_PARAMS,
        *,
        keep_on: tuple[InstanceId, ...] | None = None,
    ) -> None:
        """Begin with the prompts of requests of these lengths, computed on a group. Their KV is kept there
        or elsewhere. `params` are of all requests.
        """
        self._folder = folder
        self.lives = [
            LiveRequest(greedy_request(prompt, length, **{"num_logprobs": None, **params}))
            for prompt, length in zip(PROMPTS, lengths, strict=False)
        ]
        self.commands: list[RunBatch | ReleaseKV] = []
        self._report(prefill([live.view() for live in self.lives], group, keep_on=keep_on), 1)

    def lease(self, lease: Lease, places: Sequence[int] = ()) -> None:
        """Go on with a lease of the requests at these places, or of all. It takes all its steps."""
        lives = [self.lives[place] for place in places or range(len(self.lives))]
        masters = {live.request.request_id: i for live, i in zip(lives, lease.masters, strict=True)}
        views = [live.view() for live in lives]
        self._report(decode(views, lease.group, masters, num_steps=lease.num_steps), lease.num_steps)

    def _report(self, plan: BatchPlan, num_steps: int) -> None:
        lives = [live for live in self.lives if live.request.request_id in plan.request_ids]
        inputs = tuple(live.input_for(plan) for live in lives)
        self.commands.append(RunBatch(1 + len(self.commands), plan, inputs))
        for live in lives:
            tokens, _ = expected(self._folder, live.request.prompt_token_ids, NUM_TOKENS)
            done = len(live.output_token_ids)
            live.placement = live.placement.adding(plan.writes_of(live.request.request_id))
            live.output_token_ids += tokens[done : done + num_steps]
