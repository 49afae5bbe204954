"""Steps that read a shared prefix once give the tokens of transformers: eager, captured, and served."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from bare_instance import BareInstance, Outcome
from bare_worlds import run_commands
from captured_runs import run_by_mailboxes
from capturing_backend import CapturingBackend
from families import each_kind
from machines import H200_GRAPH_LIMITS
from requests_for_tests import greedy_request, random_prompt
from shared_leases import NUM_SHARED, NUM_TOKENS, SharedScript
from torch import Tensor

from loong.core.plan import Transfer
from loong.core.request import RequestId
from loong.fabric.messages.socket_fabric import SocketFabric
from loong.fabric.traffic import Channel
from loong.fabric.world import World
from loong.kernels.shared_table import SharedTable
from loong.model.device import CpuDevice
from loong.state.live_request import LiveRequest


@pytest.fixture
def fabric(tmp_path: Path) -> Iterator[SocketFabric]:
    fabric = SocketFabric(tmp_path, World(1, 1), 0, deadline=1.0)
    yield fabric
    fabric.close()


def tokens_of(outcomes: Sequence[Outcome]) -> dict[RequestId, list[int]]:
    found: dict[RequestId, list[int]] = defaultdict(list)
    for outcome in outcomes:
        for _, token in outcome.tokens:
            found[token.request_id].append(token.token_id)
    return found


def assert_exact(script: SharedScript, outcomes: Sequence[Outcome]) -> None:
    found = tokens_of(outcomes)
    assert {i: found[i] for i in script.expected()} == script.expected()


def count_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the shared keys of each pass."""
    passes: list[int] = []
    attend = CpuDevice.attend_shared

    def counting(self: CpuDevice, q: Tensor, kv: Tensor, table: SharedTable, **given: Any) -> None:
        passes.append(int(table.tasks[:, 3].sum()))
        attend(self, q, kv, table, **given)

    monkeypatch.setattr(CpuDevice, "attend_shared", counting)
    return passes


@each_kind
@pytest.mark.parametrize("takes_leases", [False, True])
def test_sharers_that_come_and_go_read_their_prefix_once(
    fabric: SocketFabric, folder: Path, monkeypatch: pytest.MonkeyPatch, takes_leases: bool
) -> None:
    script = SharedScript(folder, (0,), 5)
    script.lease(script.lives, (0,), 4)
    script.mix(LiveRequest(greedy_request(random_prompt(9, seed=40), NUM_TOKENS)), script.lives)
    script.mix(script.join(), script.lives[:1])
    script.end(script.lives[0])
    script.lease(script.lives, (0,), 5)
    backend = CapturingBackend(H200_GRAPH_LIMITS, takes_leases=takes_leases)
    instance = BareInstance(fabric, 0, folder, None, backend)
    instance.poison()
    passes = count_passes(monkeypatch)
    num_passes, outcomes = [], []
    for command in script.commands:
        outcomes.append(instance.carry_out(command))
        num_passes.append(len(passes))
    assert_exact(script, outcomes)
    # chunks, a lease, a mixed step, one more sharer and its chunk, a release, a lease
    num_new = [after - before for before, after in pairwise(num_passes[-8:])]
    assert [number > 0 for number in num_new] == [True, True, True, False, True, False, True]
    assert set(passes) == {21}  # keys, by any reader


@each_kind
def test_groups_and_their_holders_read_it_once(folder: Path) -> None:
    """It lies on both instances, which decode together, and then one for the other."""
    script = SharedScript(folder, (0, 1), 4)
    script.lease(script.lives, (0, 1), 4)
    script.end(script.lives[0])
    script.lease(script.lives, (1,), 4)
    outcomes = run_by_mailboxes(folder, 2, script.commands)
    assert_exact(script, [one for rank in zip(*outcomes, strict=True) for one in rank])


@each_kind
@pytest.mark.parametrize("takes_leases", [False, True], ids=["launched", "captured"])
def test_a_prefix_goes_round_a_ring_once_for_all_who_read_it(folder: Path, takes_leases: bool) -> None:
    """Its stripes are on three instances; what is saved is its KV for all requests but one."""
    num_bytes = []
    for is_sharing in (True, False):
        script = SharedScript(folder, (0, 1, 2), 4, is_sharing=is_sharing, transfer=Transfer.KV)
        outcomes = run_commands(folder, 3, script.commands, takes_leases=takes_leases)
        assert_exact(script, [one for rank in zip(*outcomes, strict=True) for one in rank])
        num_bytes.append(sum(ours[-1].traffic[Channel.RING].num_bytes for ours in outcomes))
    num_keys = sum(len(live.request.prompt_token_ids) for live in script.lives)
    assert num_bytes[0] * num_keys == num_bytes[1] * (num_keys - 3 * NUM_SHARED)
