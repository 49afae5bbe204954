"""Reasons why a request that begins reads less of the prefix cache than it could."""

from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loong.core.decision import Decision, DecisionKind
from loong.core.placement import InstanceId
from loong.core.plan import IterationPlan
from loong.core.positions import common, subtract
from loong.state.live_request import LiveRequest
from loong.state.live_requests import LiveRequests
from loong.state.owners import Gone, GoneCause, KVOwner
from loong.state.prefix_tree import PrefixTree

MAX_SALTS = 64  # others that are looked at, the newest
_WORDS: Mapping[GoneCause, str] = {
    GoneCause.EVICTED: "evicted {ago} ago to make room",
    GoneCause.RESET: "evicted {ago} ago by a reset of the cache",
    GoneCause.LOST: "lost with {where} {ago} ago",
    GoneCause.DRAINED: "dropped {ago} ago as {where} was to leave",
    GoneCause.UNSOUND: "dropped {ago} ago as the request that computed them failed",
}
OFF = "the request asks to read none"
SCORED = "its log probabilities are asked for, so all of the prompt is computed"


class _Missed(NamedTuple):
    """Positions without KV that had some."""

    positions: tuple[range, ...]
    gone: Gone


def reasons_of_misses(requests: LiveRequests, plan: IterationPlan) -> tuple[Decision, ...]:
    """Return why requests that begin with a plan, just committed, read less cached KV than they could."""
    if not (requests.owners.keeps and requests.views.waiting):  # as before the plan
        return ()
    begun = [r for batch in plan.batches for r in requests.views.waiting.keys() & batch.request_ids]
    words = ((r, Misses(requests.by_id[r], requests.owners).words()) for r in sorted(begun))
    return tuple([Decision(DecisionKind.MISS, (r,), reason) for r, reasons in words for reason in reasons])


class Misses:
    """The reasons of one request, after the commit of the plan with which it begins."""

    def __init__(self, live: LiveRequest, tree: PrefixTree) -> None:
        self._live, self._tree = live, tree

    def words(self) -> Iterator[str]:
        """Yield each reason. They say of other salts only how much is there: they are for operators."""
        live = self._live
        if not live.request.uses_cache:
            yield OFF
        elif live.request.num_prompt_logprobs is not None:
            yield SCORED
        elif live.path:
            yield from self._lacking()
            yield from self._differences()
            yield from self._of_other_salts()

    def _lacking(self) -> Iterator[str]:
        """Yield reasons for tokens that are or were cached, each cause once."""
        unread: list[tuple[range, InstanceId]] = []
        behind: list[range] = []
        missed: dict[GoneCause, list[_Missed]] = {}
        last = self._live.path[-1].positions.stop - 1
        read = [segment.positions for segment in self._live.placement.segments]
        for owner, positions in self._live.path:
            rest = subtract((range(positions.start, min(positions.stop, last)),), *read)
            for segment in owner.placement.segments if rest else ():
                found = common(rest, segment.positions)
                if owner.windowless:
                    behind += found
                else:
                    unread += [(met, segment.instance_id) for met in found]
                rest = subtract(rest, segment.positions)
            for gone in reversed(owner.gone if rest else ()):
                met = common(rest, gone.positions)
                rest = subtract(rest, gone.positions)
                if gone.time == self._tree.now:  # by this very plan, which did not read it
                    unread += [(part, gone.instance_id) for part in met]
                elif met:
                    missed.setdefault(gone.cause, []).append(_Missed(met, gone))
        if behind:
            yield f"{_tokens(behind)}, since layers with a window keep no KV for all places to go on from"
        if unread:
            where = _instances({instance_id for _, instance_id in unread})
            yield f"{_tokens([part for part, _ in unread])} on {where}, which the policy computes instead"
        for cause, parts in missed.items():
            where = _instances({part.gone.instance_id for part in parts})
            ago = _duration(self._tree.now - max(part.gone.time for part in parts))
            tokens = _tokens([positions for part in parts for positions in part.positions])
            yield f"{tokens}, {_WORDS[cause].format(ago=ago, where=where)}"

    def _differences(self) -> Iterator[str]:
        """Yield where it goes on as no request before it, while another went on otherwise."""
        request_id = self._live.request.request_id
        for owner, positions in self._live.path:
            start, before = owner.start, owner.parent
            is_first = positions.start == start and owner.author_at(start) == request_id
            other = (
                before.author_at(start) if is_first and before is not None and start < before.stop else None
            )
            if other not in (None, request_id):
                yield f"it differs from request {other} at token {start:,}"

    def _of_other_salts(self) -> Iterator[str]:
        """Yield a sentence if requests of another salt have left more of its tokens."""
        root = self._live.path[0].owner.root
        others = (r for r in reversed(self._tree.roots.values()) if r is not root and r.is_kept)
        tokens = self._live.prompt_tokens()[:-1]  # the last is always computed
        most = max([_num_held(other, tokens) for other in islice(others, MAX_SALTS)], default=0)
        if most and most > _num_held(root, tokens):
            yield f"its first {most:,} tokens are there for another salt"


def _num_held(root: KVOwner, token_ids: NDArray[np.int32]) -> int:
    """Return how many of the first tokens of a sequence have KV below a root."""
    owner, first = root, 0
    while first < len(token_ids):
        child = owner.children.get((first, int(token_ids[first])))
        if child is None:
            break
        stop = first + child.num_matching(token_ids, first)
        held = [segment.positions for segment in child.placement.segments]
        if lacking := subtract((range(first, stop),), *held):
            return min(positions.start for positions in lacking)
        owner, first = child, stop
    return first


def _tokens(ranges: Collection[range]) -> str:
    num_tokens, first = sum(map(len, ranges)), min(positions.start for positions in ranges)
    return f"{num_tokens:,} {'token' if num_tokens == 1 else 'tokens'} from token {first:,} on"


def _instances(instance_ids: Collection[InstanceId]) -> str:
    ids = list(map(str, sorted(instance_ids)))
    return f"instance {ids[0]}" if len(ids) == 1 else f"instances {', '.join(ids[:-1])} and {ids[-1]}"


def _duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"
