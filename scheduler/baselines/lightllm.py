"""LightLLM's admission of requests: the policy `lightllm`, with its chunked prefill (SplitFuse).

A request begins, first come, first served, if the slots of all requests fit at every future moment. While the
pool is emptier than `router_token_ratio`, outputs are taken to be shorter than declared. Then more requests
begin than might fit, and the latest are preempted if they do not. A ratio of 0 over-commits nothing.
"""

from collections.abc import Iterable

from loong.core.request import RequestView
from loong.scheduler.baselines.fixed_groups import FixedGroup
from loong.scheduler.config import PolicyConfig

EXPECTED_TOKENS = 1024  # of an output, while it is shorter
EXPECTED_GROWTH = 1.1  # of longer outputs, over what they have


def admits(group: FixedGroup, view: RequestView, config: PolicyConfig) -> bool:
    """Return whether a request may begin on a group."""
    views = (*group.held, *group.joining, view)
    num_used = group.capacity - group.num_free + group.num_joining_tokens
    is_busy = num_used >= config.router_token_ratio * group.capacity
    most_outputs = [v.max_tokens if is_busy else _expected_tokens(v) for v in views]
    peak = most_slots(
        (v.num_known_tokens, most - v.num_output_tokens) for v, most in zip(views, most_outputs, strict=True)
    )
    return peak + group.num_leaving <= group.capacity


def most_slots(lengths: Iterable[tuple[int, int]]) -> int:
    """Return the most slots in use at once, given each request's tokens and those that it is to produce.

    All advance one token at a time together. The last token of each needs no slot.
    """
    num_held = most = 0
    by_end = sorted(
        ((max(0, num_to_come - 1), num_known) for num_known, num_to_come in lengths), reverse=True
    )
    for number, (num_to_come, num_known) in enumerate(by_end, start=1):
        num_held += num_known
        most = max(most, num_held + number * num_to_come)
    return most


def _expected_tokens(view: RequestView) -> int:
    """Return the output tokens that a request is expected to have at its end."""
    return min(view.max_tokens, max(EXPECTED_TOKENS, int(EXPECTED_GROWTH * view.num_output_tokens)))
