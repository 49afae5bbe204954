"""Checks of tensors in the wrappers of kernels."""

import torch
from torch import Tensor


class Dims:
    """Letters bound to sizes by the first tensor that names them, and compared with every later one.

    The letters are those of the whole project: T query tokens, S KV tokens, H query heads, K KV heads, D head
    dim, B requests, E hidden size. A number in place of a letter is the size itself. "T ..." has any dims
    after the first.
    """

    __slots__ = ("_bound",)

    def __init__(self) -> None:
        self._bound: dict[str, tuple[int, str]] = {}

    def bind(
        self,
        name: str,
        tensor: Tensor,
        letters: str,
        dtype: torch.dtype | None = None,
        *,
        is_contiguous: bool = True,
    ) -> None:
        """Check rank, sizes, dtype and contiguity of `tensor` against `letters`, such as "T H D".

        `dtype=None` accepts any dtype; `is_contiguous=False` accepts any strides. Raises ValueError with
        `name`, the expected and the actual value.
        """
        expected, shape = letters.split(), tensor.shape
        if expected[-1] == "...":
            expected, shape = expected[:-1], shape[: len(expected) - 1]
        if len(shape) != len(expected):
            raise ValueError(f"{name} must have shape [{', '.join(expected)}], got {list(tensor.shape)}")
        for letter, size in zip(expected, shape, strict=True):
            if letter.isdecimal() and size != int(letter):
                raise ValueError(f"{name} must have shape [{', '.join(expected)}], got {list(tensor.shape)}")
            bound, bound_by = self._bound.setdefault(letter, (size, name))
            if size != bound:
                raise ValueError(f"{name} must have {letter}={bound} as {bound_by} has, got {letter}={size}")
        if dtype is not None and tensor.dtype != dtype:
            raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}")
        if is_contiguous and not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")

    def bind_rows(self, name: str, tensor: Tensor, letters: str, dtype: torch.dtype | None = None) -> None:
        """Check like `bind`, but allow any distance between the rows of the first dim, each of them
        contiguous.
        """
        self.bind(name, tensor, letters, dtype, is_contiguous=False)
        if not tensor[:1].is_contiguous():
            raise ValueError(f"{name} must have contiguous rows, got strides {tensor.stride()}")

    def bind_size(self, letter: str, size: int) -> None:
        """Bind a letter to a size that follows from others."""
        self._bound.setdefault(letter, (size, letter))

    def group_size(self) -> int:
        """Return how many query heads share a KV head. Raises ValueError if H is not a multiple of K."""
        if self["H"] % self["K"] != 0:
            raise ValueError(f"query heads must be a multiple of KV heads, got {self['H']} and {self['K']}")
        return self["H"] // self["K"]

    def __getitem__(self, letter: str) -> int:
        return self._bound[letter][0]
