"""A request from its arrival to the release of its KV, as `ClusterState` keeps it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from struct import pack

import numpy as np
from numpy.typing import NDArray

from loong.core.errors import InvalidEventError
from loong.core.instructions import RequestInput, Sibling
from loong.core.placement import (
    BorrowedKV,
    CachedKV,
    InstanceId,
    KVSegment,
    OwnerId,
    Placement,
    shared_of,
)
from loong.core.plan import BatchPlan, KVMigration
from loong.core.positions import at_or_after, before, common, subtract
from loong.core.prompt_logprobs import ScoredChunk
from loong.core.request import Request, RequestView, TokenId
from loong.core.window_memory import WindowMemory, ending_before
from loong.state.loss_row import LossRow
from loong.state.owners import KVOwner
from loong.state.prefix_tree import Path, cached_on, first_missing_on, owner_at


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request from its arrival to the release of its KV.

    `placement` is all KV that it reads: its own, and what it has `borrowed` from other owners. The choices of
    a prompt share the list `unstarted` until its first, the primary, has computed the prompt; then it is
    empty. `number` is its place in the order of arrival. `is_view_stale` is set when its view must be made
    anew.

    While its batch is ending, the batch id moves from `batch_id` to `ending_id`, so that the next batch can
    be planned. `predicted_token_time` is the time of a token that is predicted but not there yet. A request
    that is predicted to end then `is_leaving`: no policy sees it any more. Positions that are `lost` had KV,
    which was evicted or lost with an instance. `losses` are those of instances that it may have caused.

    The owners on its `path` have its tokens, and KV that it may borrow until it begins. It `has_unshared` KV
    of these tokens if no owner was offered all of it. One that `is_following` waits for another to compute
    what both need next; no policy sees it meanwhile. If it `reads_once`, steps read what it shares with
    others once for all of them. With memory for `windows` alone, layers with a window have its own KV only of
    positions from `windows_from` on. If it `is_broken`, it lacks KV there that it needs: it begins anew once
    nothing in flight touches it, and no policy sees it before.
    """

    request: Request
    placement: Placement = field(default_factory=Placement)
    output_token_ids: list[TokenId] = field(default_factory=list)
    batch_id: int | None = None
    ending_id: int | None = None
    predicted_token_time: float | None = None
    is_leaving: bool = False
    migration_ids: set[int] = field(default_factory=set)
    copied: list[KVMigration] = field(default_factory=list)  # that wait for the end of its batch
    has_ended: bool = False
    last_group: frozenset[InstanceId] | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    is_view_stale: bool = False
    unstarted: "list[LiveRequest]" = field(default_factory=list, repr=False)
    borrowed: tuple[KVOwner, ...] = ()
    number: int = 0
    losses: LossRow = field(default_factory=LossRow)
    lost: tuple[range, ...] = ()
    is_scored: bool = False  # the whole prompt, if asked for
    path: Path = ()
    prompt_array: NDArray[np.int32] | None = field(default=None, repr=False)
    has_unshared: bool = False
    is_following: bool = False
    is_sound: bool = True  # its KV, as far as is known
    reads_once: bool = True
    windows: WindowMemory | None = None
    windows_from: int = 0
    is_broken: bool = False

    @classmethod
    def choices_of(cls, request: Request) -> "list[LiveRequest]":
        """Return all choices of a request that arrives."""
        choices = [cls(choice) for choice in request.choices()]
        for choice in choices if len(choices) > 1 else ():
            choice.unstarted = choices
        if (before := request.continues) is not None and before.output_token_ids:
            primary, arrived_at = choices[0], request.arrival_time
            primary.output_token_ids += before.output_token_ids
            primary.first_token_time = arrived_at - before.first_token_age
            primary.last_token_time = arrived_at
        return choices

    @property
    def is_sibling(self) -> bool:
        """Return whether it waits for another choice to compute their prompt."""
        return bool(self.unstarted) and self.unstarted[0] is not self

    @property
    def siblings(self) -> "list[LiveRequest]":
        """Return the choices that wait for it."""
        return [] if not self.unstarted or self.is_sibling else self.unstarted[1:]

    @property
    def is_at_rest(self) -> bool:
        """Return whether nothing in flight touches it."""
        return self.batch_id is None and self.ending_id is None and not self.migration_ids

    @property
    def num_output_tokens(self) -> int:
        """Return the tokens that it has, with the one that is predicted."""
        return len(self.output_token_ids) + (self.predicted_token_time is not None)

    @property
    def has_begun(self) -> bool:
        """Return whether it has KV, or is in a batch."""
        return self.batch_id is not None or bool(self.placement.segments)

    @property
    def may_borrow(self) -> bool:
        """Return whether it may begin with KV of others. All of a prompt that is scored is computed."""
        return bool(self.path) and not self.has_begun and self.request.num_prompt_logprobs is None

    def note_new(self, batch: BatchPlan) -> None:
        """Note what it has to share by a batch that has ended."""
        if self.path and not self.has_unshared:
            first = batch.blocks_of(self.request.request_id)[0].positions.start
            self.has_unshared = first < self.path[-1].positions.stop

    def prompt_tokens(self) -> NDArray[np.int32]:
        """Return the tokens of its prompt, which are made an array only once."""
        if self.prompt_array is None:
            token_ids = self.request.prompt_token_ids
            packed = pack(f"{len(token_ids)}i", *token_ids)  # in half the time of an array
            self.prompt_array = np.frombuffer(packed, dtype=np.int32)
        return self.prompt_array

    def known_tokens(self) -> NDArray[np.int32]:
        """Return the tokens of its prompt, and its output so far."""
        prompt, outputs = self.prompt_tokens(), self.output_token_ids
        return np.concatenate([prompt, np.array(outputs, dtype=np.int32)]) if outputs else prompt

    def cached(self) -> tuple[CachedKV, ...]:
        """Return the KV on its path that it may borrow."""
        cached, no_ends = cached_on(self.path) if self.may_borrow else (), self.no_ends()
        return ending_before(cached, no_ends) if no_ends else cached

    def no_ends(self) -> tuple[range, ...]:
        """Return the positions at which it cannot begin to compute, see `WindowMemory`."""
        if self.windows is None or not self.may_borrow:
            return ()
        gone = [common(owner.windowless, positions) for owner, positions in self.path]
        return self.windows.no_ends(chain.from_iterable(gone))

    def next_missing(self) -> tuple[OwnerId, int] | None:
        """Return the first position that it needs and that no instance has, with the owner of that token.

        None if nothing on its path but its last token is missing, as in every decode.
        """
        if self.has_begun:
            return owner_at(self.path, self.placement.first_missing)
        if self.may_borrow:
            return first_missing_on(self.path, self.cached() if self.windows else None)
        return owner_at(self.path, 0) if self.path and self.path[-1].positions.stop > 1 else None

    def lacks_windows(self, first: int) -> bool:
        """Return whether it has KV of positions from `first` on that layers with a window lack."""
        own = (p for s in self.own.segments for p in before((s.positions,), self.windows_from))
        borrowed = (
            met
            for owner in self.borrowed
            for segment in owner.users[self.request.request_id]
            for met in common((segment.positions,), *owner.windowless)
        )
        return any(at_or_after(chain(own, borrowed), first))

    @property
    def own(self) -> Placement:
        """Return the KV that no other owner has."""
        if not self.borrowed:
            return self.placement
        read: dict[InstanceId, list[range]] = {}
        for owner in self.borrowed:
            for _, positions, instance_id in owner.read_by(self.request.request_id).segments:
                read.setdefault(instance_id, []).append(positions)
        own = [
            segment._replace(positions=rest)
            for segment in self.placement.segments
            if segment.positions not in (there := read.get(segment.instance_id, ()))
            for rest in subtract((segment.positions,), *there)
        ]
        return Placement(tuple(own))

    @property
    def is_to_switch(self) -> bool:
        """Return whether some owner's KV that it may read is retired."""
        return any(owner.retired.segments for owner in self.borrowed)

    def borrow(self, owner: KVOwner) -> None:
        """Note that it reads KV of an owner."""
        if not any(known is owner for known in self.borrowed):
            self.borrowed = (*self.borrowed, owner)

    def lose(self, instance_id: InstanceId) -> None:
        """Drop the KV on an instance, which is lost."""
        if instance_id in self.placement.instance_ids:
            self._lose(self.placement.on(instance_id))
            self.placement = self.placement.without(instance_id)

    def evict(self, segment: KVSegment) -> None:
        """Drop KV that it has."""
        self._lose((segment.positions,))
        self.placement = self.placement.removing(segment)

    def _lose(self, positions: tuple[range, ...]) -> None:
        self.lost = (*self.lost, *subtract(positions, *self.lost))

    def regain(self, segments: Iterable[KVSegment]) -> int:
        """Return how many of these tokens, which now have KV, had some before that was lost."""
        if not self.lost:
            return 0
        num_lost = sum(map(len, self.lost))
        self.lost = subtract(self.lost, *[segment.positions for segment in segments])
        return num_lost - sum(map(len, self.lost))

    def error_of_going_on(self) -> InvalidEventError:
        """Return the error of a request that continues past its last token."""
        return InvalidEventError(
            f"request {self.request.request_id} goes on after {len(self.output_token_ids)} "
            f"of at most {self.request.sampling_params.max_tokens} tokens"
        )

    def view(self) -> RequestView:
        """Return the request as policies see it."""
        request, predicted_token_time = self.request, self.predicted_token_time
        borrowed = self._shared() if self.borrowed else ()
        return RequestView(  # by position, which is faster than by name
            request.request_id,
            len(request.prompt_token_ids),
            self.num_output_tokens,
            request.sampling_params.max_tokens,
            request.arrival_time,
            request.slo,
            self._sharing(borrowed) if borrowed else self.placement,
            self.batch_id,
            bool(self.migration_ids) or bool(self.copied),
            self.has_ended,
            request.user,
            predicted_token_time if self.first_token_time is None else self.first_token_time,
            len(self.siblings),
            borrowed,
            request.priority,
            self.last_token_time if predicted_token_time is None else predicted_token_time,
            self.losses.num_losses,
            self.losses.suspected,
            self.losses.num_others,
            self.cached() if self.path else (),
            self.no_ends() if self.path else (),
        )

    def _shared(self) -> tuple[BorrowedKV, ...]:
        parts = [(o.owner_id, o.shared_with(self.request.request_id)) for o in self.borrowed]
        return tuple([BorrowedKV(owner_id, shared) for owner_id, shared in parts if shared.segments])

    def _sharing(self, borrowed: Iterable[BorrowedKV]) -> Placement:
        """Return the placement with what steps read once for several requests, in the owners' names."""
        return self.placement.sharing(shared_of(borrowed) if self.reads_once else ())

    def input_for(self, batch: BatchPlan) -> RequestInput:
        """Return the input of this request for the workers of a batch."""
        first, stop = self.placement.first_missing, self._stop_of(batch)
        prompt, outputs = self.request.prompt_token_ids, self.output_token_ids
        num_prompt, num_outputs = len(prompt), self.num_output_tokens
        if first >= num_prompt:
            token_ids: Sequence[TokenId] = tuple(outputs[first - num_prompt : stop - num_prompt])
        elif stop > num_prompt:
            token_ids = (*prompt[first:], *outputs[: stop - num_prompt])
        else:
            token_ids = prompt[first:stop]
        params = self.request.sampling_params if stop == num_prompt + num_outputs else None
        needs_output = params is not None and params.needs_output
        needs_prompt = params is not None and params.repetition_penalty != 1.0
        return RequestInput(  # by position, as above
            self.request.request_id,
            token_ids,
            num_prompt,
            num_outputs,
            self._sharing(self._shared()) if self.borrowed else self.placement,
            params,
            prompt if needs_prompt else (),
            tuple(outputs) if needs_output else (),
            tuple([sibling.as_sibling() for sibling in self.siblings]) if self.siblings and params else (),
            None if self.predicted_token_time is None else self.ending_id,
        )

    def scored_chunk(self, batch: BatchPlan) -> ScoredChunk | None:
        """Return the chunk of the prompt to score in a batch; None if there is none, or all is scored.

        A part that is computed again is scored again until a batch with the end of the prompt has ended.
        """
        num_top, prompt = self.request.num_prompt_logprobs, self.request.prompt_token_ids
        if num_top is None or self.is_scored or self.placement.first_missing >= len(prompt) - 1:
            return None
        stop = self._stop_of(batch)
        next_token_id = prompt[stop] if stop < len(prompt) else None
        return ScoredChunk(self.request.request_id, next_token_id, num_top)

    def _stop_of(self, batch: BatchPlan) -> int:
        """Return one more than the last position that a batch computes."""
        return max([block.positions[-1] for block in batch.blocks_of(self.request.request_id)]) + 1

    def as_sibling(self) -> Sibling:
        """Return the sibling for the workers of the batch that ends the prompt of its primary."""
        return Sibling(self.request.request_id, self.request.sampling_params)
