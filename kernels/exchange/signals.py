"""Flags by which GPUs signal that memory is written, or may be written again.

A flag is an int64 in the memory of the process that waits for it. One process writes it, on one stream. Its
values are epochs, which only grow: `batch_id * EPOCHS + count`. So a late write for an earlier batch cannot
satisfy a wait of a later one.

Waits always end. They end early when the host abandons the batch, or after a time limit, which they report to
the host in the same word. A process with a failed wait in a batch sets no more flags of that batch, so that
no peer uses its results.

`raise_flag` and `await_flag` are for use inside kernels; `signal` and `wait` launch them alone.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from loong.kernels.contract import Dims
from loong.kernels.launch import Launcher

EPOCHS = 1 << 24  # in a batch
_EPOCHS = tl.constexpr(EPOCHS)
_POLLS_A_LOOK = tl.constexpr(64)
_IS_COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)


class Deadline(NamedTuple):
    """The end of waits. `word` [2] int64 is host memory that the device can access.

    word[0] is the last abandoned epoch: waits for it and for earlier ones end at once. A wait longer than
    `limit` (nanoseconds; interpreted, polls) sets word[0] to the last epoch of its batch, and word[1] to the
    source that it waited for. `stop` [1] int64, on the device, is the last epoch of the last batch with a
    failed wait. Both begin below every epoch.
    """

    word: Tensor
    stop: Tensor
    limit: int


def signal(
    addresses: Tensor,
    offset: int,
    members: int,
    epoch: int,
    deadline: Deadline,
    *,
    stream: int | None = None,
) -> None:
    """Set the flag at `offset` bytes of every member's memory, after all earlier work of the stream.

    Contract:
        addresses [N] int64, contiguous, at most 63: the address of each rank's memory on this device.
        members: a bit for each rank to signal; the memory of others is not touched.
        stream: a handle; None is the current one.
    """
    Dims().bind("addresses", addresses, "N", torch.int64)
    _signals(len(addresses), addresses, offset, members, epoch, deadline.stop, stream=stream)


def wait(
    memory: Tensor, offset: int, epoch: int, source: int, deadline: Deadline, *, stream: int | None = None
) -> None:
    """Make the stream wait until the flag at `offset` bytes is at least `epoch`, or the `deadline` ends it.

    Contract:
        memory [num_bytes] uint8. Data written before the flag was set can then be read. `source` sets the
            flag. `stream` is as in `signal`.
    """
    Dims().bind("memory", memory, "M", torch.uint8)
    _waits(1, memory, offset, epoch, source, *deadline, stream=stream)


@triton.jit
def raise_flag(flag: tl.tensor, epoch: tl.tensor, stop: tl.tensor) -> None:
    """Set the flag at the address `flag` (int64), after all earlier writes of the program."""
    tl.debug_barrier()
    if tl.load(stop, volatile=True) < epoch:
        tl.atomic_xchg(flag.to(tl.pointer_type(tl.int64)), epoch, sem="release", scope="sys")


@triton.jit
def set_flag(flag: tl.tensor, epoch: tl.tensor) -> None:
    """Set a flag as `raise_flag` does, for a caller that has checked that no wait failed."""
    tl.debug_barrier()
    tl.atomic_xchg(flag.to(tl.pointer_type(tl.int64)), epoch, sem="release", scope="sys")


@triton.jit
def await_flag(
    flag: tl.tensor,
    epoch: tl.tensor,
    source: tl.tensor,
    word: tl.tensor,
    stop: tl.tensor,
    limit: tl.tensor,
    poll_interval: tl.tensor,
) -> None:
    """Spin until the flag (a pointer to int64) is at least `epoch`, or until the `Deadline` passes.

    The program may then read data written before the flag was set, with `.cg` loads. The host's memory is
    slow, and concurrent polls delay each other. So of many waiting programs, all but one should have a
    `poll_interval` above 1. They poll the host that much less often, and see in `stop` when the other one
    fails.
    """
    num_polls = tl.full((), 0, tl.int64)
    begun_at = now(num_polls)
    last = epoch | (_EPOCHS - 1)
    is_waiting = tl.load(flag, volatile=True) < epoch
    while is_waiting:
        num_polls += 1
        is_waiting = tl.load(flag, volatile=True) < epoch
        if is_waiting & (num_polls % _POLLS_A_LOOK == 0):
            is_waiting = tl.load(stop, volatile=True) < epoch
        if is_waiting & (num_polls % (_POLLS_A_LOOK * poll_interval) == 0):
            if now(num_polls) - begun_at > limit:
                tl.store(word + 1, source)
                tl.store(word, last)
            is_waiting = tl.load(word, volatile=True) < epoch
            if not is_waiting:
                tl.store(stop, last)
    never = tl.full((), -1, tl.int64)
    tl.atomic_cas(flag, never, never, sem="acquire", scope="sys")  # compilers remove an atomic addition of 0
    tl.debug_barrier()


@triton.jit
def now(num_polls: tl.tensor) -> tl.tensor:
    """Return nanoseconds, or the number of polls in the interpreter, which has no such clock."""
    if _IS_COMPILED:
        return globaltimer()
    return num_polls


@triton.jit(do_not_specialize=["offset", "members", "epoch"])
def _signal(
    addresses: tl.tensor, offset: tl.tensor, members: tl.tensor, epoch: tl.tensor, stop: tl.tensor
) -> None:
    rank = tl.program_id(0)
    if (members.to(tl.int64) >> rank) & 1:
        raise_flag(tl.load(addresses + rank) + offset, epoch.to(tl.int64), stop)


@triton.jit(do_not_specialize=["offset", "epoch", "source", "limit"])
def _wait(
    memory: tl.tensor,
    offset: tl.tensor,
    epoch: tl.tensor,
    source: tl.tensor,
    word: tl.tensor,
    stop: tl.tensor,
    limit: tl.tensor,
) -> None:
    flag = (memory + offset).to(tl.pointer_type(tl.int64))
    await_flag(flag, epoch.to(tl.int64), source.to(tl.int64), word, stop, limit.to(tl.int64), 1)


_signals, _waits = Launcher(_signal, num_warps=1, maxnreg=32), Launcher(_wait, num_warps=1, maxnreg=32)
