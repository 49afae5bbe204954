"""Flags: their writers, waiters, and the ends of waits. One process plays all ranks."""

import pytest
import torch
from torch import Tensor

from loong.kernels.exchange.signals import EPOCHS, Deadline, signal, wait

SHORT, LONG = 1_000, 10**12  # interpreted kernels count polls


def some_deadline(limit: int, device: torch.device) -> Deadline:
    word = torch.full((2,), -1, dtype=torch.int64, pin_memory=device.type == "cuda")
    return Deadline(word, torch.full((1,), -1, device=device), limit)


def flags_of(device: torch.device) -> Tensor:
    """Return the flags of three ranks, two each."""
    return torch.zeros(3, 2, dtype=torch.int64, device=device)


def report(flags: Tensor, members: int, epoch: int, deadline: Deadline) -> None:
    """Set the second flags of some ranks."""
    addresses = torch.tensor([row.data_ptr() for row in flags], device=flags.device)
    signal(addresses, 8, members, epoch, deadline)


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def test_the_members_that_are_named_are_reported_and_nobody_else(device: torch.device) -> None:
    flags = flags_of(device)
    report(flags, 0b101, 7 * EPOCHS + 3, some_deadline(LONG, device))
    assert flags.tolist() == [[0, 7 * EPOCHS + 3], [0, 0], [0, 7 * EPOCHS + 3]]


@pytest.mark.parametrize("epoch", [5 * EPOCHS + 2, 5 * EPOCHS + 1, 3 * EPOCHS + 9])
def test_a_wait_ends_for_what_was_reported_and_all_before(epoch: int, device: torch.device) -> None:
    flag, deadline = flags_of(device)[0, :1], some_deadline(LONG, device)
    flag.fill_(5 * EPOCHS + 2)
    wait(flag.view(torch.uint8), 0, epoch, 1, deadline)
    finish(device)
    assert deadline.word.tolist() == [-1, -1]
    assert deadline.stop.item() == -1


@pytest.mark.parametrize("reported", [4 * EPOCHS + 9, 5 * EPOCHS])
def test_a_wait_that_lasts_too_long_abandons_its_batch_and_names_the_source(
    reported: int, device: torch.device
) -> None:
    flag, deadline = flags_of(device)[0, :1], some_deadline(SHORT, device)
    flag.fill_(reported)
    wait(flag.view(torch.uint8), 0, 5 * EPOCHS + 1, 2, deadline)
    finish(device)
    assert deadline.word.tolist() == [6 * EPOCHS - 1, 2]
    assert flag.item() == reported


def test_a_wait_of_an_abandoned_batch_ends_at_once_and_says_nothing(device: torch.device) -> None:
    flag, deadline = flags_of(device)[0, :1], some_deadline(LONG, device)
    deadline.word[0] = 6 * EPOCHS - 1
    wait(flag.view(torch.uint8), 0, 5 * EPOCHS + 1, 2, deadline)
    finish(device)
    assert deadline.word.tolist() == [6 * EPOCHS - 1, -1]


def test_who_gave_up_waiting_reports_nothing_more_of_the_batch_but_of_the_next(device: torch.device) -> None:
    flags, deadline = flags_of(device), some_deadline(SHORT, device)
    wait(flags[0, :1].view(torch.uint8), 0, 5 * EPOCHS + 1, 2, deadline)
    report(flags, 0b1, 5 * EPOCHS + 2, deadline)
    report(flags, 0b10, 6 * EPOCHS, deadline)
    assert flags[:, 1].tolist() == [0, 6 * EPOCHS, 0]
