"""Exchanges of any rows between two instances, one of which is played by the test."""

import pytest
import torch
from kernel_cases import poisoned, random_values
from torch import Tensor

from loong.kernels import Partial, reference
from loong.kernels.exchange.mailbox import Mailbox
from loong.kernels.exchange.row_exchange import RowExchange, RowPeers
from loong.kernels.exchange.signals import EPOCHS, Deadline

NUM_HEADS, HEAD_DIM, ROOM = 3, 24, 4
CPU = torch.device("cpu")
SHORT, ENDLESS = 50, 1 << 40  # polls


def mailbox() -> Mailbox:
    ends = [256]

    def reserve(num_bytes: int) -> int:
        ends.append(ends[-1] + -(-num_bytes // 16) * 16)
        return ends[-2]

    memory = torch.zeros(1 << 16, dtype=torch.uint8)
    return Mailbox.laid(memory, reserve, (2, ROOM, NUM_HEADS, HEAD_DIM), torch.float32)


def values(seed: int, num_rows: int) -> Tensor:
    return random_values(seed, num_rows, NUM_HEADS, HEAD_DIM, dtype=torch.float32, device=CPU)


def exchange(
    own: Mailbox, other: Mailbox, limit: int, num_peer_rows: int = 1
) -> tuple[RowExchange, Deadline]:
    """Of instance 0, which asks instance 1 about its rows 4 and 2, and is asked by it."""
    tables = {
        "addresses": [box.memory.data_ptr() for box in (own, other)],
        "ranks": [10, 11],
        "num_sent_rows": [0, 2],
        "num_peer_rows": [0, num_peer_rows],
        "sent_from": [0, 0],
        "served_from": [0, 0],
        "rows": [4, 2],
        "merged_rows": [2, 4],
        "places": [[-1, 1], [-1, 0]],
        "epoch": [EPOCHS],
    }
    deadline = Deadline(torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), limit)
    peers = RowPeers(**{name: torch.tensor(table) for name, table in tables.items()})
    return RowExchange(own, peers, deadline, 0), deadline


def test_rows_are_put_where_their_peer_looks_and_answers_are_merged_into_them() -> None:
    own, other = mailbox(), mailbox()
    step, deadline = exchange(own, other, ENDLESS)
    q, part = values(0, 6), Partial(values(1, 1), values(2, 1)[..., 0].contiguous())
    step.put(q, layer=3)
    assert torch.equal(other.queries[0, :2], q[[4, 2]])
    assert (other.query_flags[0, :2, 0] == EPOCHS + 3).all()
    own.query_flags[1, 0, 0] = own.part_flags[1, :2, 0] = EPOCHS + 3
    step.wait(layer=3)
    out, lse = values(3, 6), values(4, 6)[..., 0].contiguous()
    came, came_lse = values(5, 2), values(6, 2)[..., 0].contiguous()
    lse[2, 0], lse[4, 1], came_lse[0, 1], came_lse[1, 2] = (
        -torch.inf,
    ) * 4  # rows 4 and 2 come in this order
    own.parts.lse[1, :2] = came_lse
    own.parts.out[1, :2] = came.masked_fill(torch.isinf(came_lse)[..., None], torch.nan)
    expected = Partial(out.clone(), lse.clone())
    reference.merge_into(expected, Partial(came[None], came_lse[None]), torch.tensor([4, 2]))
    total = Partial(out.masked_fill(torch.isinf(lse)[..., None], torch.nan), lse)
    step.send_partials(part, total, layer=3)
    seen = torch.isfinite(expected.lse)
    torch.testing.assert_close(total.out[seen], expected.out[seen])
    torch.testing.assert_close(total.lse, expected.lse)
    assert torch.equal(other.parts.out[0, 0], part.out[0])
    assert torch.equal(other.parts.lse[0, 0], part.lse[0])
    assert other.part_flags[0, :, 0].tolist() == [EPOCHS + 3, 0, 0, 0]
    assert deadline.word.tolist() == [0, 0]


def test_who_waits_in_vain_says_for_whom_and_answers_nobody() -> None:
    own, other = mailbox(), mailbox()
    step, deadline = exchange(own, other, SHORT)
    step.wait(layer=0)
    assert deadline.word.tolist() == [2 * EPOCHS - 1, 11]
    part = Partial(
        poisoned(1, NUM_HEADS, HEAD_DIM, dtype=torch.float32, device=CPU), torch.zeros(1, NUM_HEADS)
    )
    total = Partial.identity(6, NUM_HEADS, HEAD_DIM, CPU)
    step.send_partials(part, total, layer=0)
    step.put(values(0, 6), layer=1)
    assert not other.part_flags.any()
    assert not other.query_flags.any()
    assert not other.queries.any()


def test_what_does_not_fit_the_mailbox_is_refused() -> None:
    step, _ = exchange(mailbox(), mailbox(), ENDLESS)
    with pytest.raises(ValueError, match=r"q must have shape \[A, 3, 24\], got \[6, 2, 24\]"):
        step.put(values(0, 6)[:, :2].contiguous(), layer=0)
    with pytest.raises(ValueError, match=r"q must be torch\.float32, got torch\.float16"):
        step.put(values(0, 6).half(), layer=0)
