"""Flags by which GPUs tell one another what is written, and what may be written again.

A flag is an int64 in the memory of the process that waits for it, and one process, on one stream, writes it.
Its values are epochs, which only grow: `batch_id * EPOCHS + count`. So whatever a late writer tells of an
earlier batch satisfies no wait of a later one. Waiting never hangs: it ends too when the host says that the
batch is abandoned, or when it has lasted too long, which it then tells the host in the same word. Whoever
gave up waiting in a batch sets no flag of it any more, so what is made of nothing is told to nobody.

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
    """When to give up waiting. `word` [2] int64 lies in memory of the host that the device reaches.

    word[0] is the last epoch that is abandoned: waits for it and all before end at once. A wait that lasts
    longer than `limit` (nanoseconds; interpreted, polls) sets word[0] to the last epoch of its batch, and
    word[1] to the source that it waited for. `stop` [1] int64, on the device, is the last epoch of the last
    batch in which a wait gave up; both begin below every epoch.
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
    """Set the flag at `offset` bytes of every member's memory, behind all that the stream did before.

    Contract:
        addresses [N] int64, contiguous, at most 63: where each rank's memory begins, as this device sees it.
        members: a bit for each rank that is told; the memory of others is not touched.
        stream: a handle; None is the current one.
    """
    Dims().bind("addresses", addresses, "N", torch.int64)
    _signals(len(addresses), addresses, offset, members, epoch, deadline.stop, stream=stream)


def wait(
    memory: Tensor, offset: int, epoch: int, source: int, deadline: Deadline, *, stream: int | None = None
) -> None:
    """Let the stream go on once the flag at `offset` bytes is at least `epoch`, or waiting has no more use.

    Contract:
        memory [num_bytes] uint8. What was written before the flag was set can then be read. `source` is who
        is to set it; the stream as above.
    """
    Dims().bind("memory", memory, "M", torch.uint8)
    _waits(1, memory, offset, epoch, source, *deadline, stream=stream)


@triton.jit
def raise_flag(flag: tl.tensor, epoch: tl.tensor, stop: tl.tensor) -> None:
    """Set the flag at the address `flag` (int64), behind all that the program wrote before."""
    tl.debug_barrier()
    if tl.load(stop, volatile=True) < epoch:
        tl.atomic_xchg(flag.to(tl.pointer_type(tl.int64)), epoch, sem="release", scope="sys")


@triton.jit
def set_flag(flag: tl.tensor, epoch: tl.tensor) -> None:
    """As `raise_flag`, of who has looked before whether waits were given up, and told nobody if so."""
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

    The program may then read what was written before the flag was set; `.cg` loads see it. The host's memory
    is far, and who looks at it at once waits for one another. So of many programs that wait together, let all
    but one have `poll_interval` above 1, and look so many times less often: they see in `stop` when that one
    gives up.
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
    tl.atomic_cas(flag, never, never, sem="acquire", scope="sys")  # compilers drop one that adds 0
    tl.debug_barrier()


@triton.jit
def now(num_polls: tl.tensor) -> tl.tensor:
    """Nanoseconds; interpreted, where there is no such clock, the polls so far."""
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
