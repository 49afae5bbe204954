"""Decode leases over mailboxes in shared memory, by interpreted kernels, give the tokens of transformers."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from bare_instance import BareInstance, Outcome
from captured_runs import run_by_mailboxes, run_on_gpus
from group_leases import NUM_TOKENS, PROMPTS, Lease, LeaseScript
from mailbox_backend import MailboxBackend
from socket_worlds import Carrier, run_in_world

from loong.core.instructions import ReleaseKV, RunBatch
from loong.core.placement import InstanceId
from loong.fabric.errors import PeerLostError
from loong.fabric.protocol import Fabric
from loong.fabric.traffic import Channel
from loong.fabric.world import World


def a_script(folder: Path) -> LeaseScript:
    """Holders outside a group are one or several, and members before or after."""
    script = LeaseScript(folder, (0, 1), (NUM_TOKENS, NUM_TOKENS))
    for lease in (
        Lease((1, 0), (0, 1), 2),
        Lease((2,), (2, 2), 3),
        Lease((0, 2), (0, 2), 2),
        Lease((2, 0, 1), (2, 2), 2),
        Lease((1,), (1, 1), 2),
    ):
        script.lease(lease)
    return script


def check(script: LeaseScript, by_rank: Sequence[Sequence[Outcome]]) -> None:
    """All tokens came, were right, and needed no message with queries: kernels put them."""
    reported = [
        token for step in zip(*by_rank, strict=True) for outcome in step for _, token in outcome.tokens
    ]
    for live in script.lives:
        name = live.request.request_id
        assert [token.token_id for token in reported if token.request_id == name] == live.output_token_ids
    traffic = [outcome.traffic[Channel.QUERIES] for outcomes in by_rank for outcome in outcomes]
    assert all(sent.messages == 0 for sent in traffic)


def test_groups_and_holders_that_change_give_the_tokens_of_transformers(folder: Path) -> None:
    script = a_script(folder)
    check(script, run_by_mailboxes(folder, 3, script.commands))


def readers_of_one(folder: Path) -> LeaseScript:
    """Return leases of two groups that read KV of instance 0 at a time, while it runs one of its own."""
    script = LeaseScript(folder, (0,), [NUM_TOKENS] * 3)
    for first, second in ((1, 2), (2, 1), (1, 2)):
        script.lease(Lease((first,), (first,), 3), places=[0])
        script.lease(Lease((second,), (second,), 3), places=[1])
        script.lease(Lease((0,), (0,), 2), places=[2])
    return script


def test_an_instance_serves_leases_of_several_groups_at_once(folder: Path) -> None:
    script = readers_of_one(folder)
    check(script, run_by_mailboxes(folder, 3, script.commands))


def test_an_instance_without_weights_serves_captured_leases(folder: Path) -> None:
    script = LeaseScript(folder, (0,), (NUM_TOKENS, NUM_TOKENS), keep_on=(1,))
    for _ in range(3):
        script.lease(Lease((0,), (0, 0), 3))
    by_rank = run_by_mailboxes(folder, 2, script.commands, weightless_ids=(1,))
    check(script, by_rank)
    assert by_rank[1][-1].num_slots_used == sum(len(prompt) for prompt in PROMPTS[:2])


@pytest.mark.multigpu
def test_so_it_does_on_gpus(folder: Path) -> None:
    script = readers_of_one(folder)
    check(script, run_on_gpus(folder, 3, script.commands))


def leases_of_two(folder: Path) -> LeaseScript:
    """Return leases of two instances: one serves the other, or both are members."""
    script = LeaseScript(folder, (0,), (NUM_TOKENS, NUM_TOKENS))
    for lease in (Lease((1,), (1, 1), 2), Lease((1, 0), (0, 1), 2), Lease((0,), (0, 0), 2)):
        script.lease(lease)
    return script


def test_each_rank_of_a_holder_serves_its_own_rank(folder: Path) -> None:
    script = leases_of_two(folder)
    check(script, run_by_mailboxes(folder, 2, script.commands, tp_size=2))


@pytest.mark.multigpu
def test_so_it_does_on_four_gpus(folder: Path) -> None:
    script = leases_of_two(folder)
    check(script, run_on_gpus(folder, 2, script.commands, tp_size=2))


@pytest.mark.multigpu
def test_so_do_those_on_gpus(folder: Path) -> None:
    script = LeaseScript(folder, (0, 1), (NUM_TOKENS, NUM_TOKENS))  # two instances: each needs a GPU
    for lease in (Lease((1, 0), (0, 1), 2), Lease((1,), (1, 1), 3), Lease((0,), (0, 0), 2)):
        script.lease(lease)
    check(script, run_on_gpus(folder, 2, script.commands))


def lose_the_other(
    fabric: Fabric,
    instance_id: InstanceId,
    tp_rank: int,
    folder: Path,
    commands: Sequence[RunBatch | ReleaseKV],
) -> str:
    """Return the error of a lease on instance 0, after instance 1 has died before it."""
    instance = BareInstance(fabric, instance_id, folder, None, MailboxBackend())
    prompt, lease = commands
    instance.carry_out(prompt)
    if instance_id == 1:
        os._exit(0)
    try:
        instance.carry_out(lease)
    except PeerLostError as error:
        return str(error)
    instance.end_service()
    return ""


@pytest.mark.parametrize("group", [(0, 1), (0,)], ids=["a member", "a holder"])
def test_a_lease_ends_at_once_when_one_that_takes_part_is_lost(
    folder: Path, group: tuple[InstanceId, ...]
) -> None:
    script = LeaseScript(folder, (0, 1), (NUM_TOKENS,))
    script.lease(Lease(group, (0,), 5))
    survivor, _ = run_in_world(
        lose_the_other, World(2, 1), folder, script.commands, carrier=Carrier.ARENAS, num_victims=1
    )
    assert str(survivor).endswith("batch 2: instance 1 (tensor-parallel rank 0) is lost")


def test_a_holder_goes_on_when_the_member_that_it_serves_is_lost(folder: Path) -> None:
    script = LeaseScript(folder, (0, 1), (NUM_TOKENS,))
    script.lease(Lease((1,), (1,), 5))
    survivor, _ = run_in_world(
        lose_the_other, World(2, 1), folder, script.commands, carrier=Carrier.ARENAS, num_victims=1
    )
    assert survivor == ""
