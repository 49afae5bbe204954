"""Tokens do not depend on chunks, on the ring, or on the place of the history."""

from collections.abc import Sequence
from itertools import chain, combinations
from pathlib import Path

import pytest
from cluster import Cluster
from plans import both, decode, in_group, plannable, prefill
from requests_for_tests import assert_exact, greedy_request, random_prompt

from loong.core.cost.cost_model import CostModel
from loong.core.instructions import RunBatch
from loong.core.placement import InstanceId
from loong.core.plan import IterationPlan, Transfer
from loong.core.request import Request
from loong.core.snapshot import Snapshot

ALL = (0, 1, 2, 3)
RINGS_OF_2 = ((0, 1), (2, 0), (0, 3), (1, 2), (3, 1), (2, 3))
RINGS_OF_3 = ((0, 1, 2), (3, 2, 1), (2, 3, 0), (1, 0, 3))
RINGS_OF_4 = ((0, 1, 3, 2), (1, 2, 0, 3), (2, 3, 1, 0), (3, 0, 2, 1))
SUBSETS = tuple(chain.from_iterable(combinations(ALL, size) for size in (1, 2, 3, 4)))


def requests_of_lengths(*lengths: int, num_tokens: int = 4) -> list[Request]:
    return [greedy_request(random_prompt(length, seed=length), num_tokens) for length in lengths]


@pytest.mark.parametrize("transfer", Transfer)
@pytest.mark.parametrize("chunk", [1, 7, 64, None])
def test_chunks_of_any_size_of_several_prompts_are_exact(
    cluster: Cluster, folder: Path, chunk: int | None, transfer: Transfer
) -> None:
    requests = requests_of_lengths(70, 1, 33, 2)
    outputs = cluster.run(requests, in_group(3, 0, 2, chunk=chunk, transfer=transfer, num_steps=4))
    assert_exact(folder, requests, outputs)


# In these, each instance has each place, and sends to each other.
@pytest.mark.parametrize("groups", [RINGS_OF_2, RINGS_OF_3, RINGS_OF_4], ids=["2", "3", "4"])
def test_any_ring_order_is_exact(
    cluster: Cluster, folder: Path, groups: Sequence[tuple[InstanceId, ...]]
) -> None:
    for group in groups:
        requests = requests_of_lengths(31, 18)
        outputs = cluster.run(requests, in_group(*group, chunk=16, keep_on=group[::-1], num_steps=4))
        assert_exact(folder, requests, outputs)


@pytest.mark.parametrize("transfers", [(Transfer.KV,), (Transfer.QUERY,), tuple(Transfer)])
def test_history_may_be_on_any_instances(
    cluster: Cluster, folder: Path, transfers: tuple[Transfer, ...]
) -> None:
    """Each chunk is computed by one subset of the group, and stays on another if its KV travels."""

    def policy(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        plans = []
        for view in plannable(snapshot):
            if view.is_decoding:
                plans.append(decode([view], ALL, {view.request_id: view.num_known_tokens % 4}))
                continue
            number = view.num_computed_tokens // 3
            transfer = transfers[number % len(transfers)]
            masters = SUBSETS[number % len(SUBSETS)]
            keep_on = SUBSETS[::-1][number % len(SUBSETS)] if transfer is Transfer.KV else None
            plans.append(
                prefill([view], ALL, num_tokens=3, masters=masters, keep_on=keep_on, transfer=transfer)
            )
        return IterationPlan(tuple(plans[:1]))

    requests = requests_of_lengths(47)
    assert_exact(folder, requests, cluster.run(requests, policy))


@pytest.mark.parametrize("transfer", Transfer)
def test_a_batch_may_carry_chunks_and_decode_tokens(
    cluster: Cluster, folder: Path, transfer: Transfer
) -> None:
    """The short prompt decodes while the long one is prefilled, in the same batches."""
    group: tuple[InstanceId, ...] = (1, 3, 0)

    def policy(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        views = plannable(snapshot)
        old, new = [v for v in views if v.is_decoding], [v for v in views if not v.is_decoding]
        if not views:
            return IterationPlan()
        chunks = prefill(new, group, num_tokens=9, transfer=transfer)
        tokens = decode(old, group, {v.request_id: group[v.num_known_tokens % 3] for v in old})
        return IterationPlan((both(chunks, tokens),))

    requests = requests_of_lengths(7, 60, 20, num_tokens=8)
    assert_exact(folder, requests, cluster.run(requests, policy))
    batches = [reported for reported in cluster.log if isinstance(reported, RunBatch)]
    assert any({1, 9} <= {len(given.token_ids) for given in batch.inputs} for batch in batches)
