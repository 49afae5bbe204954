"""Requests that begin alike, as commands for instances without an engine."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from plans import both, decode, prefill
from requests_for_tests import expected, greedy_request, random_prompt

from loong.core.instructions import ReleaseKV, RunBatch, ShareKV
from loong.core.placement import InstanceId, Placement
from loong.core.plan import BatchPlan, Transfer
from loong.core.request import RequestId
from loong.state.live_request import LiveRequest

NUM_TOKENS = 24  # of each request, at most
NUM_SHARED = 21


class SharedScript:
    """A request that computes a prefix on a group, and others that read it there.

    `is_sharing` is false for the same requests as if each had its KV alone, in the same slots. `transfer` is
    that of prompts.
    """

    def __init__(
        self,
        folder: Path,
        group: tuple[InstanceId, ...],
        num_sharers: int,
        *,
        is_sharing: bool = True,
        transfer: Transfer = Transfer.QUERY,
    ) -> None:
        self._folder, self._group, self._transfer = folder, group, transfer
        self.commands: list[RunBatch | ReleaseKV | ShareKV] = []
        self.lives = [self._behind_prefix(number) for number in range(num_sharers)]
        first, *others = self.lives
        self.report(prefill([first.view()], group, num_tokens=NUM_SHARED, transfer=transfer), [first])
        self._node = node = first.placement.of("kv-1")
        self.commands.append(ShareKV("kv-1", first.placement.segments))
        for live in (first, *others):
            request_id = live.request.request_id
            live.placement = first.placement.of(request_id)
            if live is not first:
                self.commands.append(ShareKV(request_id, node.segments))
        if is_sharing:
            for live in self.lives:
                live.placement = live.placement.sharing(node.segments)
        self.compute(self.lives)

    def join(self) -> LiveRequest:
        """Return one more request that reads the prefix."""
        live = self._behind_prefix(len(self.commands))
        self.commands.append(ShareKV(live.request.request_id, self._node.segments))
        live.placement = self._node.of(live.request.request_id).sharing(self._node.segments)
        return live

    def compute(self, lives: Sequence[LiveRequest]) -> None:
        """Compute the rest of prompts, all in one step."""
        chunks = prefill([live.view() for live in lives], self._group, transfer=self._transfer)
        self.report(chunks, lives)

    def lease(self, lives: Sequence[LiveRequest], group: tuple[InstanceId, ...], num_steps: int) -> None:
        """Go on with a lease of some requests, whose masters are the members in turn."""
        masters = self._masters(lives, group)
        plan = decode([live.view() for live in lives], group, masters, num_steps=num_steps)
        self.report(plan, lives, num_steps)

    def mix(self, prompt: LiveRequest, lives: Sequence[LiveRequest]) -> None:
        """Compute a new prompt in one step with a token of each of some requests."""
        chunk = prefill([prompt.view()], self._group, transfer=self._transfer)
        step = decode([live.view() for live in lives], self._group, self._masters(lives, self._group))
        self.report(both(chunk, step), [prompt, *lives])

    def end(self, live: LiveRequest) -> None:
        """Release a request."""
        self.commands.append(ReleaseKV(live.request.request_id, live.placement.instance_ids))
        self.lives.remove(live)

    def expected(self) -> dict[RequestId, list[int]]:
        """Return the tokens of transformers that the commands so far produce."""
        return {live.request.request_id: live.output_token_ids for live in self.lives}

    def _behind_prefix(self, number: int) -> LiveRequest:
        prompt = (*random_prompt(NUM_SHARED, seed=5), *random_prompt(2 + number % 3, seed=number))
        return LiveRequest(replace(greedy_request(prompt, NUM_TOKENS), request_id=f"r{number}"))

    def _masters(
        self, lives: Sequence[LiveRequest], group: tuple[InstanceId, ...]
    ) -> dict[RequestId, InstanceId]:
        return {live.request.request_id: group[n % len(group)] for n, live in enumerate(lives)}

    def report(self, plan: BatchPlan, lives: Sequence[LiveRequest], num_steps: int = 1) -> None:
        """Add a batch, and give its tokens to the requests."""
        inputs = tuple(live.input_for(plan) for live in lives)
        self.commands.append(RunBatch(1 + len(self.commands), plan, inputs))
        for live, given in zip(lives, inputs, strict=True):
            live.placement = live.placement.adding(plan.writes_of(live.request.request_id))
            if given.sampling_params is not None:
                tokens, _ = expected(self._folder, live.request.prompt_token_ids, NUM_TOKENS)
                done = len(live.output_token_ids)
                live.output_token_ids += tokens[done : done + num_steps]


def unshared(placement: Placement) -> Placement:
    """Return a placement that shares nothing."""
    return placement.sharing(())
