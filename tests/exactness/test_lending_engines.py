"""Requests whose KV is in room of another engine have the tokens of transformers.

Both engines are on one host, or each is on a host of its own, and KV moves over TCP.
"""

import signal
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
from cluster import Cluster, Outputs
from lending_engines import LendingEngines, lending_engines
from plans import decode, plannable, prefill
from requests_for_tests import assert_exact, greedy_request, random_prompt

from loong.core.cost.cost_model import CostModel
from loong.core.instructions import MoveKV, RunBatch
from loong.core.plan import IterationPlan, Transfer
from loong.core.request import Request
from loong.core.snapshot import Snapshot
from loong.launcher.cluster.config import ClusterConfig
from loong.scheduler.common import moving_kv
from loong.scheduler.config import PolicyConfig
from loong.scheduler.policy import make_policy

OWN, LENT, CREDITOR_POOL, PIECE = 96, 320, 512, 16
FIRST_LOAN_ID = 1


@pytest.fixture(scope="module", params=["local", "ray"])
def engines(folder: Path, request: pytest.FixtureRequest) -> Iterator[LendingEngines]:
    """Yield engine 0, which has room, and engine 1, which has little."""
    configs = [
        ClusterConfig(str(folder), num_instances=1, kv_capacity=n, max_loans=2, hosts=request.param)
        for n in (CREDITOR_POOL, OWN)
    ]
    with lending_engines(*configs) as running:
        yield running


@pytest.fixture(autouse=True)
def _nothing_leaks(engines: LendingEngines, folder: Path) -> Iterator[None]:
    """After each test all slots of both engines are free again: a request that needs them all runs."""
    yield
    engines.wait_until_returned()
    for cluster, num_slots in zip(engines.clusters, (CREDITOR_POOL, OWN), strict=True):
        assert cluster.snapshot.instance[0].kv_capacity == num_slots
        request = greedy_request(random_prompt(num_slots - 4, seed=1), 4)
        assert_exact(folder, [request], cluster.run([request], at_home))


def in_room(snapshot: Snapshot, _cost_model: CostModel, /) -> IterationPlan:
    """Keep all KV of a prompt in borrowed room while there is any, else at home."""
    views = plannable(snapshot)
    if snapshot.batches or not views:
        return IterationPlan()
    keep_on = tuple(snapshot.memory_pools) or (0,)
    if prompts := [view for view in views if not view.is_decoding]:
        batch = prefill(prompts[:1], (0,), keep_on=keep_on, num_tokens=40, transfer=Transfer.QUERY)
        return IterationPlan((batch,))
    return IterationPlan((decode(views[:1], (0,), {views[0].request_id: 0}, num_steps=4),))


def at_home(snapshot: Snapshot, _cost_model: CostModel, /) -> IterationPlan:
    """Compute a prompt at once, and then its output."""
    views = plannable(snapshot)
    if snapshot.batches or not views:
        return IterationPlan()
    if not views[0].is_decoding:
        return IterationPlan((prefill(views[:1], (0,)),))
    return IterationPlan((decode(views[:1], (0,), {views[0].request_id: 0}, num_steps=2),))


def long_request() -> Request:
    """Return a request with more KV than its engine has room for."""
    return greedy_request(random_prompt(2 * OWN, seed=3), 24)


def holders(cluster: Cluster) -> set[int]:
    return {i for run in cluster.log if isinstance(run, RunBatch) for i in run.holder_ids}


def test_a_prompt_that_is_longer_than_its_engines_room_is_read_in_that_of_another(
    engines: LendingEngines, folder: Path
) -> None:
    creditor, debtor = engines.clusters
    engines.borrow(1, LENT)
    assert creditor.snapshot.lent == {0: LENT}
    assert creditor.snapshot.instance[0].kv_capacity == CREDITOR_POOL - LENT
    request, other = long_request(), greedy_request(random_prompt(150, seed=4), 20)
    assert_exact(folder, [request], debtor.run([request], in_room))
    assert FIRST_LOAN_ID in holders(debtor)
    assert_exact(folder, [other], creditor.run([other], at_home))
    (loan,) = engines.lendings[0].room.lent.values()
    assert (loan.debtor_id, loan.creditor_id, loan.num_tokens) == (1, 0, LENT)
    engines.give_back(1)


def test_the_room_of_a_debtor_that_dies_returns(engines: LendingEngines) -> None:
    creditor, debtor = engines.clusters
    engines.borrow(1, LENT)
    member = engines.members[1]
    engines.lose(1)
    creditor.wait_until(lambda snapshot: not snapshot.lent)
    debtor.wait_until(lambda snapshot: not snapshot.memory_pools)
    engines.members[1] = member
    engines.call(engines.tell)


@pytest.mark.parametrize("victim", ["loan", "creditor's worker", "creditor"])
def test_a_request_goes_on_when_lent_room_is_lost(engines: LendingEngines, folder: Path, victim: str) -> None:
    """It is computed again at home, where it has just enough room."""
    creditor, debtor = engines.clusters
    engines.borrow(1, LENT)
    request, killed = greedy_request(random_prompt(OWN // 2, seed=5), 30), list[str]()
    members = dict(engines.members)

    def policy(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        if not killed and any(view.num_output_tokens >= 6 for view in snapshot.running):
            killed.append(victim)
            if victim == "creditor":
                del engines.members[0]
                engines.tell()
            else:
                kill(engines, victim)
        if killed and snapshot.stats.num_losses == before.num_losses:
            return IterationPlan()  # until the loss is known
        return in_room(snapshot, cost_model)

    before = debtor.snapshot.stats
    assert_exact(folder, [request], debtor.run([request], policy, timeout=60))
    assert killed
    stats = debtor.snapshot.stats
    assert stats.num_losses == before.num_losses + 1
    assert stats.num_recomputed_tokens > before.num_recomputed_tokens
    if victim == "creditor":  # which only the debtor believes to be dead
        engines.members.update(members)
        engines.call(engines.tell)
        engines.call(engines.turn)
    creditor.wait_until(lambda snapshot: not snapshot.lent and bool(snapshot.pools))


def test_engines_that_keep_each_others_kv_swap_it_home(engines: LendingEngines, folder: Path) -> None:
    """The smaller of both loans ends while requests decode: what it keeps goes home, and no token changes."""
    creditor, debtor = engines.clusters
    engines.borrow(1, 128)
    engines.borrow(0, 64)
    assert [cluster.snapshot.lent for cluster in engines.clusters] == [{0: 128}, {0: 64}]
    requests = [greedy_request(random_prompt(OWN // 3, seed=7 + i), 24) for i in range(2)]
    outputs, swapped = list[Outputs](), list[bool]()

    def policy(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        if not swapped and any(view.num_output_tokens >= 4 for view in snapshot.running):
            swapped.append(True)
            engines.swap()
        return (
            make_policy("esp", PolicyConfig())(snapshot, cost_model)
            if swapped
            else in_room(snapshot, cost_model)
        )

    other = Thread(target=lambda: outputs.append(creditor.run(requests[:1], policy)))
    other.start()
    outputs.append(debtor.run(requests[1:], in_room))
    other.join()
    assert_exact(folder, requests, {**outputs[0], **outputs[1]})
    assert swapped
    creditor.wait_until(lambda snapshot: not snapshot.memory_pools)
    debtor.wait_until(lambda snapshot: not snapshot.lent)
    engines.give_back(1)


def test_room_is_given_back_in_pieces_while_requests_decode(
    engines: LendingEngines, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moving_kv, "LEAST_PIECE", PIECE)
    monkeypatch.setattr(moving_kv, "PIECE_SECONDS", 0.0)
    debtor, esp = engines.clusters[1], make_policy("esp", PolicyConfig(lease_steps=4))
    engines.borrow(1, 128)
    request, given = greedy_request(random_prompt(OWN // 2, seed=9), 40), list[bool]()

    def policy(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        if not given and any(view.num_output_tokens >= 4 for view in snapshot.running):
            given.append(True)
            engines.give_back_soon(1)
        if given and snapshot.memory_pools:
            return IterationPlan()  # until the instance drains
        return esp(snapshot, cost_model) if given else in_room(snapshot, cost_model)

    assert_exact(folder, [request], debtor.run([request], policy))
    moves = [run.migration for run in debtor.log if isinstance(run, MoveKV)]
    pieces = [len(move.segment.positions) for move in moves]
    assert max(pieces) <= PIECE
    assert sum(pieces) == OWN // 2
    engines.wait_until_returned()


@pytest.mark.parametrize("what", ["creditor's worker dies", "creditor dies", "creditor needs its room"])
def test_a_request_that_fits_only_with_a_loan_ends_whatever_its_creditor_does(
    engines: LendingEngines, folder: Path, what: str
) -> None:
    """It borrows again after a loss. A creditor that needs its room waits until the request has ended."""
    creditor, debtor = engines.clusters
    request, other = long_request(), greedy_request(random_prompt(CREDITOR_POOL - 20, seed=6), 12)
    done, others = list[str](), list[Outputs]()
    esp = make_policy("esp", PolicyConfig(max_loan=LENT, max_num_batched_tokens=40, lease_steps=4))

    def policy(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        if not done and any(view.num_output_tokens >= 6 for view in snapshot.running):
            done.append(what)
            if what == "creditor dies":
                member = engines.members.pop(0)
                engines.tell()
                engines.members[0] = member
                engines.tell()
            elif what == "creditor's worker dies":
                kill(engines, "creditor's worker")
            else:
                needing.start()
        if done and has_lost and snapshot.stats.num_losses == before.num_losses:
            return IterationPlan()  # until the loss is known
        return esp(snapshot, cost_model)

    has_lost = what != "creditor needs its room"
    needing = Thread(target=lambda: others.append(creditor.run([other], esp, timeout=60)))
    before = debtor.snapshot.stats
    with engines.acting():
        assert_exact(folder, [request], debtor.run([request], policy, timeout=60))
        if needing.ident is not None:
            needing.join()
            assert_exact(folder, [other], others[0])
        engines.wait_until_returned()
    assert done
    stats = debtor.snapshot.stats
    assert FIRST_LOAN_ID in holders(debtor)
    assert stats.num_losses - before.num_losses == has_lost
    assert (stats.num_recomputed_tokens > before.num_recomputed_tokens) == has_lost


def kill(engines: LendingEngines, victim: str) -> None:
    """Kill the process of the loan, or of the instance that has lent."""
    restarts = engines.clusters[0].executor.restarts
    assert restarts is not None
    assert restarts.room is not None
    if victim == "loan":
        (loan_id,) = engines.lendings[0].room.lent
        restarts.room.end(loan_id)
    else:
        (send,) = restarts.processes_of(0)
        send(signal.SIGKILL)
