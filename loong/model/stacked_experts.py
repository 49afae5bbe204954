"""Checkpoints that have all experts of a layer in one tensor, as gpt-oss has them, in MXFP4 too."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from torch import Tensor

from loong.core.errors import ConfigError
from loong.model.quantization.mxfp4 import BLOCK, BYTES_A_BLOCK, mxfp4_weight
from loong.model.tensor_source import TensorSource

_STACKED = re.compile(r"(model\.layers\.[0-9]+\.mlp\.experts\.)(gate_up|down)_proj(_bias|_blocks|_scales)?")
_EXPERT = re.compile(r"(model\.layers\.[0-9]+\.mlp\.experts\.)([0-9]+)\.(gate|up|down)_proj\.(weight|bias)")
_PARTS: Final = {"gate_up": ("gate", "up"), "down": ("down",)}
_STACK_OF: Final = {part: stack for stack, parts in _PARTS.items() for part in parts}


@dataclass(frozen=True)
class StackedExperts:
    """A `TensorSource` with each expert's tensors.

    The checkpoint has `gate_up_proj` [X, E, 2 F], where gates and ups alternate, and `down_proj` [X, F, E].
    Biases are `gate_up_proj_bias` [X, 2 F] and `down_proj_bias` [X, E]. In MXFP4 there are `_blocks`
    [X, rows, columns / 32, 16] and `_scales` [X, rows, columns / 32] of the transposed matrices.
    """

    stored: TensorSource

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of all tensors. Raises ConfigError for a stack of other dimensions."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in self.stored.shapes.items():
            if (match := _STACKED.fullmatch(name)) is None:
                shapes[name] = shape
            elif match[3] != "_scales":
                num_experts, *whole = self._expert_shape(name, shape, match[3])
                parts = _PARTS[match[2]]
                its = (whole[0] // len(parts), *whole[1:])
                kind = "bias" if match[3] == "_bias" else "weight"
                for number in range(num_experts):
                    shapes |= {f"{match[1]}{number}.{part}_proj.{kind}": its for part in parts}
        return shapes

    def read(self, name: str, *index: slice) -> Tensor:
        """Return a part of a tensor. Raises ConfigError if its parts do not fit each other."""
        if (match := _EXPERT.fullmatch(name)) is None:
            return self.stored.read(name, *index)
        stack, number = _STACK_OF[match[3]], int(match[2])
        base, one = f"{match[1]}{stack}_proj", slice(number, number + 1)
        parts = _PARTS[stack]
        rows = slice(parts.index(match[3]), None, len(parts))
        if match[4] == "bias":
            return self.stored.read(f"{base}_bias", one)[0][rows][index or ...]
        if base in self.stored.shapes:
            return self.stored.read(base, one)[0].T[rows][index or ...]
        blocks, scales = f"{base}_blocks", f"{base}_scales"
        if (shape := self.stored.shapes.get(scales)) != self.stored.shapes[blocks][:-1]:
            wanted = list(self.stored.shapes[blocks][:-1])
            raise ConfigError(f"tensor {scales} must have shape {wanted}, got {shape}")
        wanted_rows = (self.stored.read(name, one)[0][rows][index[:1] or ...] for name in (blocks, scales))
        return mxfp4_weight(*wanted_rows)[:, *index[1:]]

    def _expert_shape(self, name: str, shape: tuple[int, ...], ending: str | None) -> tuple[int, ...]:
        """Return the number of experts, and the shape of one's matrix or bias of all parts."""
        if ending == "_bias" and len(shape) == 2:
            return shape
        if ending is None and len(shape) == 3:
            return shape[0], shape[2], shape[1]
        if ending == "_blocks" and len(shape) == 4 and shape[3] == BYTES_A_BLOCK:
            return shape[0], shape[1], shape[2] * BLOCK
        raise ConfigError(f"tensor {name} has an unexpected shape {list(shape)}")
