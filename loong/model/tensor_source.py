"""Named tensors of a whole model, wherever they come from."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor


class TensorSource(Protocol):
    """Named tensors of a whole model, which are read in parts."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of all tensors."""

    def read(self, name: str, *index: slice) -> Tensor:
        """Return a part of a tensor, of any dtype and on any device. Raises ConfigError on failure."""
