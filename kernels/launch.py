"""Fast launches of Triton kernels, in half of the host's time or less.

Triton inspects every argument of every call, because it compiles a kernel for properties of its arguments. A
kernel that follows a few rules is compiled for types only. It launches faster, on any stream, without making
that stream the current one.
"""

from collections.abc import Hashable
from typing import TypeAlias

import triton
from torch import Tensor

Argument: TypeAlias = Tensor | int
_IS_INTERPRETED = triton.knobs.runtime.interpret
_WIDE = 1 << 62  # makes Triton compile for 64-bit integers


class Launcher:
    """A kernel of Triton, and its options.

    Contract of the kernel: constants come last. The alignment of tensors does not matter, or is that of an
    allocation. No integer is specialized on (`do_not_specialize`), and all are passed in 64 bits. Every
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
