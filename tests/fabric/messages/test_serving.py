"""Batches that an instance serves while it runs its own: open at once, ended by any failure."""

import os
import signal
from contextlib import suppress

import pytest
import torch
from processes import Exited
from socket_worlds import Carrier, run_in_world

from loong.fabric.errors import AbandonedError, PeerLostError
from loong.fabric.lanes import STEP_LANES, Lane
from loong.fabric.messages.socket_fabric import SocketFabric
from loong.fabric.protocol import Exchanging
from loong.fabric.traffic import Channel
from loong.fabric.world import World

HOLDER = 2


def ask(batch: Exchanging, number: float) -> float:
    """Send a number to the holder, and return its answer."""
    answer = torch.empty(1)
    batch.exchange({HOLDER: torch.tensor([number])}, {}, Channel.QUERIES).wait()
    batch.exchange({}, {HOLDER: answer}, Channel.PARTIALS).wait()
    return answer.item()


def answer(members: Exchanging, member_id: int) -> None:
    """Answer a member's number with half more."""
    came = torch.empty(1)
    members.exchange({}, {member_id: came}, Channel.QUERIES).wait()
    members.exchange({member_id: came + 0.5}, {}, Channel.PARTIALS).wait()


def answer_and_run_its_own(fabric: SocketFabric, instance_id: int, tp_rank: int) -> list[float]:
    """Run batches 1 and 2 on instances 0 and 1; the holder serves them while it runs batches 3 and 5."""
    if instance_id != HOLDER:
        with fabric.batch(1 + instance_id, (instance_id,), (HOLDER,)) as batch:
            return [ask(batch, 10.0 * (1 + instance_id) + step) for step in range(3)]
    first, second = (fabric.serve(1 + i, (i,))(lane) for i, lane in enumerate(STEP_LANES))
    with first as of_first:
        with fabric.batch(3, (HOLDER,)):
            answer(of_first, 0)
            with second as of_second:
                answer(of_first, 0)
                for _ in range(3):
                    answer(of_second, 1)
        with fabric.batch(5, (HOLDER,)):
            answer(of_first, 0)
    return []


@pytest.mark.parametrize("carrier", [Carrier.SOCKETS, Carrier.ARENAS])
def test_batches_are_served_in_any_order_beside_those_that_run(carrier: Carrier) -> None:
    results = run_in_world(answer_and_run_its_own, World(3, 1), carrier=carrier)
    assert results == [[10.5, 11.5, 12.5], [20.5, 21.5, 22.5], []]


class _OwnError(Exception):
    """The error with which a process leaves a batch."""


def serve_and_fail(fabric: SocketFabric, instance_id: int, tp_rank: int) -> str:
    if instance_id == HOLDER:
        with suppress(_OwnError), fabric.serve(1, (0,))(Lane.LONG_STEP):
            raise _OwnError
        return ""
    if instance_id == 0:
        with pytest.raises(AbandonedError) as caught, fabric.batch(1, (0,), (HOLDER,)) as batch:
            ask(batch, 0.0)
        return str(caught.value)
    return ""


def test_an_error_of_a_holder_ends_the_batch_of_its_members() -> None:
    message, *_ = run_in_world(serve_and_fail, World(3, 1))
    assert "instance 2 (tensor-parallel rank 0) left by an error" in str(message)


def fail_and_be_served(fabric: SocketFabric, instance_id: int, tp_rank: int) -> str:
    if instance_id == HOLDER:
        with pytest.raises(AbandonedError) as caught, fabric.serve(1, (0,))(Lane.LONG_STEP) as served:
            served.exchange({}, {0: torch.empty(1)}, Channel.QUERIES).wait()
        return str(caught.value)
    if instance_id == 0:
        with suppress(_OwnError), fabric.batch(1, (0,), (HOLDER,)):
            raise _OwnError
    return ""


def test_an_error_of_a_member_ends_what_its_holders_wait_for() -> None:
    *_, message = run_in_world(fail_and_be_served, World(3, 1))
    assert "instance 0 (tensor-parallel rank 0) left by an error" in str(message)


def ask_twice(batch: Exchanging) -> None:
    for number in range(2):
        ask(batch, float(number))


def lose_the_holder(fabric: SocketFabric, instance_id: int, tp_rank: int) -> int:
    """Let the holder die after its first answers, so that all processes have met before."""
    group = (0, 1)
    if instance_id == HOLDER:
        with fabric.serve(1, group)(Lane.LONG_STEP) as members:
            for member_id in group:
                answer(members, member_id)
            os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError) as caught, fabric.batch(1, group, (HOLDER,)) as batch:
        ask_twice(batch)
    return caught.value.instance_id


def test_a_lost_holder_ends_the_batch_long_before_the_deadline() -> None:
    results = run_in_world(lose_the_holder, World(3, 1), deadline=600.0, num_victims=1)
    assert results == [HOLDER, HOLDER, Exited(-signal.SIGKILL)]
