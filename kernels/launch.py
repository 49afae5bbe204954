"""Launching the same kernel again and again, in half of the host's time or less.

Triton looks at every argument of every call anew, for a kernel is compiled for what its arguments are: 13 to
30 us. A kernel that keeps to a few rules is compiled for their types alone, and is launched in 6 to 10 us, on
any stream, without making that stream the current one.
"""

from collections.abc import Hashable
from typing import TypeAlias

import triton
from torch import Tensor

Argument: TypeAlias = Tensor | int
_IS_INTERPRETED = triton.knobs.runtime.interpret
_WIDE = 1 << 62  # an integer of 64 bits, as which Triton compiles for all


class Launcher:
    """A kernel of Triton, and its options.

    Contract of the kernel: constants come last; of all tensors the alignment does not matter or is that of an
        allocation; no integer is specialized on (`do_not_specialize`), and all are passed in 64 bits. Every
        process has one device.
    """

    def __init__(self, kernel: object, **options: int) -> None:
        self._kernel, self._options = kernel, options
        self._compiled: dict[Hashable, object] = {}

    def __call__(
        self,
        grid: int,
        *arguments: Argument,
        constants: tuple[Hashable, ...] = (),
        stream: int | None = None,
    ) -> None:
        """Launch `grid` programs on a stream, given by its handle; None: on the current one."""
        if _IS_INTERPRETED:
            self._kernel[(grid,)](*arguments, *constants, **self._options)  # type: ignore[index]  # Triton's own
            return
        tensors = (argument for argument in arguments if isinstance(argument, Tensor))
        key = (constants, *(tensor.dtype for tensor in tensors))
        compiled = self._compiled.get(key)
        if compiled is None:
            wide = (_WIDE if isinstance(argument, int) else argument for argument in arguments)
            compiled = self._kernel.warmup(*wide, *constants, grid=(grid,), **self._options)  # type: ignore[attr-defined]
            self._compiled[key] = compiled
        compiled[grid, 1, 1](*arguments, *constants, stream=stream)  # type: ignore[index]  # Triton's own
