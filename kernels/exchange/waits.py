"""Waits for several flags inside kernels; `loong.kernels.exchange.signals` defines flags.

Reading host memory takes a warp 1 us, and warps do it one after the other. So where many programs wait, one
of them polls the host for all, and reports to the others in device memory.
"""

import triton
import triton.language as tl

from loong.kernels.exchange.signals import EPOCHS, now

# Polls of the host are about 0.7 ms apart; interpreted polls are slow enough.
_POLLS_A_LOOK = tl.constexpr(16 if triton.knobs.runtime.interpret else 1024)
_EPOCHS = tl.constexpr(EPOCHS)


@triton.jit
def watch_flags(
    flags: tl.tensor,
    is_awaited: tl.tensor,
    source: tl.tensor,
    epoch: tl.tensor,
    word: tl.tensor,
    stop: tl.tensor,
    limit: tl.tensor,
) -> None:
    """Wait as `signals.await_flag` does, for the awaited ones of `flags`, readable pointers [F].

    A failed wait reports one of the late flags by its `source` [F].
    """
    num_polls = tl.full((), 0, tl.int64)
    begun_at = now(num_polls)
    last = epoch | (_EPOCHS - 1)
    num_late = _num_late(flags, is_awaited & (tl.load(stop, volatile=True) < epoch), epoch)
    while num_late > 0:
        num_polls += 1
        num_late = _num_late(flags, is_awaited, epoch)
        if (num_late > 0) & (num_polls % _POLLS_A_LOOK == 0):
            if now(num_polls) - begun_at > limit:
                is_late = is_awaited & (tl.load(flags, volatile=True) < epoch)
                tl.store(word + 1, tl.max(tl.where(is_late, source, 0), 0).to(tl.int64))
                tl.store(word, last)
            if tl.load(word, volatile=True) >= epoch:
                num_late = tl.zeros_like(num_late)
                tl.store(stop, last)
    _acquire(flags)


@triton.jit
def watch_chunks(
    flags: tl.tensor,
    ranks: tl.tensor,
    counts: tl.tensor,
    epoch: tl.tensor,
    word: tl.tensor,
    stop: tl.tensor,
    limit: tl.tensor,
    num_instances: tl.constexpr,
    num_chunks: tl.constexpr,
    line: tl.constexpr,
    flags_room: tl.constexpr,
) -> None:
    """Wait as `watch_flags` does, for chunks of `counts` [N] rows from each instance, `line` words apart."""
    flag = tl.arange(0, flags_room)
    sender = flag // num_chunks
    is_awaited = flag % num_chunks < tl.load(counts + sender, sender < num_instances, 0)
    rank = tl.load(ranks + sender, is_awaited, 0)
    watch_flags(flags + tl.where(is_awaited, flag, 0) * line, is_awaited, rank, epoch, word, stop, limit)


@triton.jit
def await_flags(flags: tl.tensor, is_awaited: tl.tensor, epoch: tl.tensor, stop: tl.tensor) -> None:
    """Spin until those flags are raised, or the polling program has failed."""
    num_polls = tl.full((), 0, tl.int64)
    num_late = _num_late(flags, is_awaited, epoch)
    while num_late > 0:
        num_polls += 1
        num_late = _num_late(flags, is_awaited, epoch)
        if tl.load(stop, num_polls % _POLLS_A_LOOK == 0, epoch - 1, volatile=True) >= epoch:
            num_late = tl.zeros_like(num_late)
    _acquire(flags)


@triton.jit
def _num_late(flags: tl.tensor, is_awaited: tl.tensor, epoch: tl.tensor) -> tl.tensor:
    is_late = is_awaited & (tl.load(flags, volatile=True) < epoch)
    return tl.sum(is_late.to(tl.int32), 0)


@triton.jit
def _acquire(flags: tl.tensor) -> None:
    """Let the program read data written before the flags were raised, with `.cg` loads."""
    never = tl.full(flags.shape, -1, tl.int64)
    tl.atomic_cas(flags, never, never, sem="acquire", scope="sys")  # compilers remove an atomic addition of 0
    tl.debug_barrier()
