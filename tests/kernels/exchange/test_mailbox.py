"""Exchanges between processes that map one another's memory, by interpreted kernels."""

from collections.abc import Sequence
from pathlib import Path

import interpreted_kernels  # noqa: F401
import pytest
import torch
from kernel_cases import poisoned, random_values
from processes import run_on_ranks
from torch import Tensor

from loong.kernels import Partial, reference
from loong.kernels.exchange.mailbox import Mailbox, Peers, await_members, exchange_partials, exchange_queries
from loong.kernels.exchange.signals import EPOCHS, Deadline

NUM_LAYERS, NUM_HEADS, HEAD_DIM = 2, 3, 24
ARENA_BYTES = 1 << 20
ENDLESS, SHORT = 1 << 40, 50  # polls
CPU = torch.device("cpu")

Steps = list[tuple[int, ...]]  # the tokens of each instance in each step; of those that are no members: -1


def queries_of(step: int, layer: int, instance: int, num_tokens: int) -> Tensor:
    seed = 100 * step + 10 * layer + instance
    return random_values(seed, num_tokens, NUM_HEADS, HEAD_DIM, dtype=torch.float32, device=CPU)


def attend(q: Tensor, instance: int) -> Partial:
    """Stands for attention over the KV of an instance; of each head, some have seen nothing."""
    out, lse = (q * (instance + 1)).cos(), q.sum(-1) * (instance - 1)
    unseen = q[..., instance] > 0.5
    return Partial(out.masked_fill(unseen[..., None], torch.nan), lse.masked_fill(unseen, -torch.inf))


def expected(step: int, layer: int, counts: tuple[int, ...], instance: int) -> Tensor:
    q = queries_of(step, layer, instance, counts[instance])
    total = Partial.identity(len(q), NUM_HEADS, HEAD_DIM, CPU)
    for member, count in enumerate(counts):
        if count >= 0:
            part = attend(q, member)
            reference.merge_into(total, Partial(part.out.nan_to_num()[None], part.lse[None]))
    return total.out


class Reserve:
    """Gives room from byte 256 on."""

    def __init__(self) -> None:
        self.end = 256

    def __call__(self, num_bytes: int) -> int:
        offset = self.end
        self.end += -(-num_bytes // 16) * 16
        return offset


def arena(folder: Path, instance: int) -> Tensor:
    path = str(folder / f"{instance}.arena")
    return torch.from_file(path, shared=True, size=ARENA_BYTES, dtype=torch.uint8)


def mailbox(memory: Tensor, num_instances: int, num_tokens: int) -> Mailbox:
    shape = (num_instances, num_tokens, NUM_HEADS, HEAD_DIM)
    return Mailbox.laid(memory, Reserve(), shape, torch.float32)


def take_steps(
    rank: int, folder: Path, steps: Steps, rooms: Sequence[int], limit: int
) -> tuple[list[Tensor], Tensor]:
    """Return the results of each layer of each step for one instance, and the word of its deadline.

    Steps lay the mailbox out for these numbers of tokens in turn.
    """
    num_instances = len(steps[0])
    arenas = [arena(folder, instance) for instance in range(num_instances)]
    largest = mailbox(arenas[rank], num_instances, max(rooms))
    deadline = Deadline(torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), limit)
    results = []
    for step, counts in enumerate(steps):
        if counts[rank] < 0:
            continue
        room = rooms[step % len(rooms)]
        box = largest.for_fewer(room)
        addresses = [memory.data_ptr() if n >= 0 else 0 for memory, n in zip(arenas, counts, strict=True)]
        epoch = torch.tensor([(step + 1) * EPOCHS])
        num_tokens = torch.tensor(counts).clamp(min=0)
        peers = Peers(torch.tensor(addresses), num_tokens, 10 + torch.arange(num_instances), epoch)
        for layer in range(NUM_LAYERS):
            q = poisoned(room, NUM_HEADS, HEAD_DIM, dtype=torch.float32, device=CPU)
            q[: num_tokens[rank]] = queries_of(step, layer, rank, int(num_tokens[rank]))
            exchange_queries(q, box, peers, deadline, instance=rank, layer=layer)
            part = attend(box.queries, rank)
            out = torch.full_like(q, torch.nan)
            exchange_partials(part, box, peers, deadline, instance=rank, layer=layer, out=out)
            results.append(out)
    return results, deadline.word


@pytest.mark.parametrize(
    ("rooms", "steps"),
    [
        ([1], [(1, 1)]),
        ([3], [(3, 2), (0, 1), (2, -1), (-1, 3), (3, 3)]),
        ([2], [(0, 1, 2), (-1, 2, 0), (2, -1, 1), (1, 0, 0)]),
        ([4, 1, 3], [(4, 2), (1, 1), (3, 3), (3, 4)]),
        ([40], [(35, 1)]),  # more tokens than chunks
    ],
)
def test_any_group_gets_the_attention_of_all_its_members(
    tmp_path: Path, rooms: Sequence[int], steps: Steps
) -> None:
    results = run_on_ranks(take_steps, len(steps[0]), tmp_path, steps, rooms, ENDLESS)
    for instance, result in enumerate(results):
        assert isinstance(result, tuple)
        outs = iter(result[0])
        for step, counts in enumerate(steps):
            for layer in range(NUM_LAYERS if counts[instance] >= 0 else 0):
                out, count = next(outs), counts[instance]
                torch.testing.assert_close(out[:count], expected(step, layer, counts, instance))
                assert (out[count:] == 0).all()
        assert result[1].tolist() == [0, 0]


def rows_of(layer: int, instance: int) -> Tensor:
    """Return KV in rows of bytes, of 4 tokens an instance, one more than the mailbox has queries."""
    return torch.arange(4 * 64, dtype=torch.uint8).view(4, 64) + 10 * layer + 100 * instance


def take_rows(rank: int, folder: Path) -> list[Tensor]:
    """Return the rows of all instances in three layers, as they arrive at one of two."""
    arenas = [arena(folder, instance) for instance in range(2)]
    box, epoch = mailbox(arenas[rank], 2, 3), torch.tensor([EPOCHS])
    deadline = Deadline(torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), ENDLESS)
    addresses = torch.tensor([memory.data_ptr() for memory in arenas])
    peers = Peers(addresses, torch.tensor([4, 4]), torch.arange(2), epoch)
    arrived = []
    for layer in range(3):
        rows = rows_of(layer, rank)
        half = box.halves(rows)[layer % 2]
        exchange_queries(rows.view(4, 1, -1), half, peers, deadline, instance=rank, layer=layer)
        arrived.append(half.queries.flatten(2).clone())
    return arrived


def test_rows_of_kv_of_any_shape_and_dtype_reach_all_members(tmp_path: Path) -> None:
    expected = [torch.stack([rows_of(layer, instance) for instance in range(2)]) for layer in range(3)]
    for arrived in run_on_ranks(take_rows, 2, tmp_path):
        assert isinstance(arrived, list)
        assert all(map(torch.equal, arrived, expected))


def test_more_rows_of_kv_than_have_room_are_refused() -> None:
    box = mailbox(torch.zeros(ARENA_BYTES, dtype=torch.uint8), 2, 3)
    most = box.max_kv_rows(64)
    assert most == 3 * NUM_HEADS * HEAD_DIM * 4 // 64
    box.halves(torch.empty(most, 64, dtype=torch.uint8))
    with pytest.raises(ValueError, match=f"room for {most} rows, not {most + 1}"):
        box.halves(torch.empty(most + 1, 64, dtype=torch.uint8))


def test_who_waits_in_vain_gives_up_says_for_whom_and_reports_nobody_what_it_made(tmp_path: Path) -> None:
    other = mailbox(arena(tmp_path, 1), 2, 2)
    (result,) = run_on_ranks(take_steps, 1, tmp_path, [(1, 2)], [2], SHORT)
    assert isinstance(result, tuple)
    word = result[1]
    assert word.tolist() == [2 * EPOCHS - 1, 11]
    assert other.query_flags[0, 0, 0] == EPOCHS
    assert not other.part_flags.any()


@pytest.mark.parametrize(("opened", "reported"), [((7, 5), [0, 0]), ((7, 4), [6 * EPOCHS - 1, 21])])
def test_all_members_are_waited_for_and_nobody_else(opened: tuple[int, int], reported: list[int]) -> None:
    flags = torch.tensor([opened[0], 0, opened[1]]) * EPOCHS
    deadline = Deadline(torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), SHORT)
    addresses, ranks = torch.tensor([1, 0, 1]), torch.tensor([11, 0, 21])
    epoch = torch.tensor([5 * EPOCHS + 3])  # in the midst of batch 5
    await_members(flags, Peers(addresses, torch.zeros(3).long(), ranks, epoch), deadline)
    assert deadline.word.tolist() == reported


def test_what_a_mailbox_has_no_room_for_is_refused() -> None:
    box = mailbox(torch.zeros(ARENA_BYTES, dtype=torch.uint8), 2, 3)
    assert box.offset(box.queries) == 256
    none = torch.zeros(2, dtype=torch.int64)
    peers = Peers(none, none, none, none[:1])
    deadline = Deadline(torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), ENDLESS)
    q = torch.zeros(4, NUM_HEADS, HEAD_DIM)
    with pytest.raises(ValueError, match="q must have T=3"):
        exchange_queries(q, box, peers, deadline, instance=0, layer=0)
