"""Workers replay the steps that the cost model takes for captured ones."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from machines import H200_GRAPH_LIMITS
from plans import both, decode, prefill
from requests_for_tests import greedy_request, random_prompt

from loong.attention.attention_step import AttentionStep
from loong.core.cost.work import step_work
from loong.core.errors import ConfigError
from loong.core.instance import ESPGroup
from loong.core.kv_layout import KVLayout, row_of_heads
from loong.core.placement import striped
from loong.core.plan import BatchPlan, Transfer
from loong.state.live_request import LiveRequest
from loong.worker.kv.pool import KVPool
from loong.worker.steps.attended_inputs import PromptKeys
from loong.worker.steps.mixed_inputs import MixedInputs

LIMITS = replace(
    H200_GRAPH_LIMITS,
    most_prompts=5,
    least_copied=16,
    least_queries=12,
    most_pairs=3000,
    most_lone_pairs=1500,
    row_pairs=60,
    keys_a_row=2,
)
NO_POOL = KVPool(KVLayout(1, row_of_heads(1, 1), "float32"), 0, torch.device("cpu"))
MEMORY = torch.empty(MixedInputs.num_words(10_000, LIMITS), dtype=torch.int64)


def live(number: int, num_computed: int, num_tokens: int, group: tuple[int, ...]) -> LiveRequest:
    """Return a request after `num_computed` tokens in stripes, with `num_tokens` to compute."""
    request = greedy_request(random_prompt(num_computed + num_tokens, seed=number), 3)
    placement = striped(request.request_id, range(num_computed), group)
    return LiveRequest(request, placement=placement)


@given(
    group=st.sampled_from([(0,), (0, 1), (0, 1, 2, 3)]),
    prompts=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), min_size=1, max_size=7),
    num_decodes=st.integers(0, 12),
    num_kv_heads=st.sampled_from([2, 4]),
    data=st.data(),
)
def test_a_step_is_replayed_if_each_of_its_instances_has_its_part_within_the_limits(
    group: tuple[int, ...],
    prompts: list[tuple[int, int]],
    num_decodes: int,
    num_kv_heads: int,
    data: st.DataObject,
) -> None:
    dop, lives, plan = len(group), [], BatchPlan(ESPGroup(group), (), ())
    for number, (num_computed, num_tokens) in enumerate(prompts):
        masters = group[data.draw(st.integers(0, dop - 1)) :] if data.draw(st.booleans()) else group
        n = len(masters)
        lives.append(one := live(number, n * num_computed, 2 * n * num_tokens, masters))
        plan = both(plan, prefill([one.view()], group, masters=masters, transfer=Transfer.QUERY))
    for number in range(dop * num_decodes):
        decoding = live(100 + number, 20, 0, group[number % dop :][:1])
        decoding.output_token_ids.append(1)
        lives.append(decoding)
        plan = both(
            plan, decode([decoding.view()], group, {decoding.request.request_id: group[number % dop]})
        )
    placements = {one.request.request_id: one.placement for one in lives}
    works = step_work(plan, placements).instances.values()
    num_rows = max(work.num_tokens for work in works)
    limits = LIMITS.of_heads(4, num_kv_heads)
    inputs = MixedInputs(MEMORY, limits)
    keys = {inputs.prompt_keys(AttentionStep(i, plan, placements, NO_POOL), num_rows) for i in group}
    assert len(keys) == 1
    assert (keys != {None}) is all(map(limits.has, works))


@pytest.mark.parametrize(
    ("num_computed", "num_tokens", "keys"),
    [
        (0, 32, PromptKeys.FEW),
        (16, 16, PromptKeys.FEW),
        (32, 16, PromptKeys.MANY),
        (84, 16, PromptKeys.MANY),
        (85, 16, PromptKeys.IN_POOL),  # there is no room for as many in a row
        (32, 15, PromptKeys.IN_POOL),
        (200, 16, None),
    ],
)
def test_keys_of_many_queries_are_copied_and_few_of_them_not_cut(
    num_computed: int, num_tokens: int, keys: PromptKeys | None
) -> None:
    one = live(0, num_computed, num_tokens, (0,))
    plan = prefill([one.view()], (0,), transfer=Transfer.QUERY)
    step = AttentionStep(0, plan, {one.request.request_id: one.placement}, NO_POOL)
    assert MixedInputs(MEMORY, replace(LIMITS, most_copied=100)).prompt_keys(step, num_tokens) is keys


def test_fewer_pairs_are_captured_where_each_head_has_keys_of_its_own() -> None:
    limits = replace(H200_GRAPH_LIMITS, most_lone_pairs=7)
    assert limits.of_heads(32, 8) == limits
    assert limits.of_heads(32, 32) == replace(limits, most_pairs=7)
    one = live(0, 32, 16, (0,))
    plan = prefill([one.view()], (0,), transfer=Transfer.QUERY)
    step = AttentionStep(0, plan, {one.request.request_id: one.placement}, NO_POOL)
    few = replace(LIMITS, most_lone_pairs=800)
    assert MixedInputs(MEMORY, few.of_heads(4, 2)).prompt_keys(step, 16) is PromptKeys.MANY
    assert MixedInputs(MEMORY, few.of_heads(2, 2)).prompt_keys(step, 16) is None


def test_limits_beyond_the_room_of_workers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"graph_limits\.most_rows is 2049, but workers have room for 2048"):
        MixedInputs(MEMORY, replace(LIMITS, most_rows=2049))
