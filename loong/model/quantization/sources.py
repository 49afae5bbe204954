"""The tensors of quantized models: dequantized parts, and parts in FP8."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import torch
from torch import Tensor

from loong.core.errors import ConfigError
from loong.model.quantization.config import Method, Quantization
from loong.model.quantization.fp8 import Fp8Matrix, quantized_rows
from loong.model.quantization.packed import awq_weight, gptq_weight
from loong.model.tensor_shapes import is_quantized
from loong.model.tensor_source import TensorSource

_WEIGHT, _PACKED = ".weight", ".qweight"
_SCALES: Final = (".weight_scale", ".weight_scale_inv")
_PARTS_OF_PACKED: Final = (".qzeros", ".scales", ".g_idx")
_ALL: Final = slice(None)


class StoredTensors(TensorSource, Protocol):
    """The tensors of a checkpoint as they are stored."""

    def is_fp8(self, name: str) -> bool:
        """Return whether a tensor is stored in FP8."""


def dequantized(stored: StoredTensors, quantization: Quantization) -> TensorSource:
    """Return a checkpoint's tensors under the names of a model that is not quantized."""
    if quantization.method is Method.FP8:
        return StoredFp8(stored, quantization)
    return StoredPacked(stored, quantization)


@dataclass(frozen=True, slots=True)
class StoredFp8:
    """A checkpoint with weights in FP8. See Fp8Source."""

    stored: StoredTensors
    quantization: Quantization

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of all tensors, without scales."""
        return {name: shape for name, shape in self.stored.shapes.items() if not name.endswith(_SCALES)}

    def read(self, name: str, *index: slice) -> Tensor:
        """Return a part of a tensor, dequantized."""
        if not self.is_fp8(name):
            return self.stored.read(name, *index)
        return self.read_fp8(name, *index[:1]).dequantized()[(_ALL, *index[1:])]

    def is_fp8(self, name: str) -> bool:
        """See Fp8Source."""
        return self.stored.is_fp8(name)

    def read_fp8(self, name: str, rows: slice = _ALL, columns: slice = _ALL) -> Fp8Matrix:
        """See Fp8Source."""
        num_rows, num_columns = self.stored.shapes[name]
        scales, (height, width) = self._scales(name), self.quantization.block or (1, num_columns)
        row = torch.arange(num_rows)[rows] // height
        if self.quantization.block is None and len(scales) == 1:  # of the whole tensor
            row = torch.zeros_like(row)
        values = self.stored.read(name, rows, columns)
        first, stop, _ = columns.indices(num_columns)
        if self.quantization.block is None:
            return Fp8Matrix(values, scales[row], values.shape[1])
        if first % width:
            raise ConfigError(
                f"{name} cannot be cut at column {first}, within a block of {width} that has one scale"
            )
        return Fp8Matrix(values, scales[row][:, first // width : -(-stop // width)].contiguous(), width)

    def _scales(self, name: str) -> Tensor:
        """Return the scales of a weight in two dimensions, in float32."""
        names = [name.removesuffix(_WEIGHT) + ending for ending in _SCALES]
        found = next((other for other in names if other in self.stored.shapes), None)
        if found is None:
            raise ConfigError(f"the checkpoint has {name} in FP8, but neither {' nor '.join(names)}")
        num_rows, num_columns = self.stored.shapes[name]
        height, width = self.quantization.block or (1, num_columns)
        scales = self.stored.read(found).float()
        scales = scales.reshape(-1, 1) if self.quantization.block is None else scales
        wanted = (-(-num_rows // height), -(-num_columns // width))
        if tuple(scales.shape) != wanted and (self.quantization.block or scales.numel() != 1):
            raise ConfigError(f"tensor {found} must have shape {list(wanted)}, got {list(scales.shape)}")
        return scales


@dataclass(frozen=True, slots=True)
class QuantizedAtLoad:
    """Weights of layers that are quantized when they are read, a row at a time. See Fp8Source.

    Routers, norms and embeddings stay as they are.
    """

    source: TensorSource

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of all tensors."""
        return self.source.shapes

    def read(self, name: str, *index: slice) -> Tensor:
        """Return a part of a tensor, quantized and dequantized if it is a weight of a layer."""
        return (
            self.read_fp8(name, *index).dequantized() if self.is_fp8(name) else self.source.read(name, *index)
        )

    def is_fp8(self, name: str) -> bool:
        """See Fp8Source."""
        return is_quantized(name)

    def read_fp8(self, name: str, rows: slice = _ALL, columns: slice = _ALL) -> Fp8Matrix:
        """See Fp8Source. Scales are those of whole rows, for any number of ranks."""
        values, scales, _ = quantized_rows(self.source.read(name, rows))
        part = values[:, columns].contiguous()
        return Fp8Matrix(part, scales, part.shape[1])


@runtime_checkable
class Fp8Source(TensorSource, Protocol):
    """A source that has some weights in FP8, whose parts it reads either way."""

    def is_fp8(self, name: str) -> bool:
        """Return whether a tensor is in FP8."""

    def read_fp8(self, name: str, rows: slice = _ALL, columns: slice = _ALL) -> Fp8Matrix:
        """Return a part of a weight that `is_fp8`.

        Raises ConfigError if the part begins within a block of columns.
        """


@dataclass(frozen=True, slots=True)
class StoredPacked:
    """A checkpoint of AWQ or GPTQ, dequantized when it is read."""

    stored: StoredTensors
    quantization: Quantization

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of all tensors, with dequantized weights in place of their parts."""
        shapes: dict[str, tuple[int, ...]] = {}
        per_word = 32 // self.quantization.bits
        for name, shape in self.stored.shapes.items():
            if name.endswith(_PACKED) and len(shape) == 2:
                is_awq = self.quantization.method is Method.AWQ
                size, width = (shape[0], shape[1] * per_word) if is_awq else (shape[0] * per_word, shape[1])
                shapes[name.removesuffix(_PACKED) + _WEIGHT] = (width, size)
            elif not name.endswith(_PARTS_OF_PACKED):
                shapes[name] = shape
        return shapes

    def read(self, name: str, *index: slice) -> Tensor:
        """Return a part of a tensor, dequantized. Raises ConfigError if its parts do not fit each other."""
        if name in self.stored.shapes:
            return self.stored.read(name, *index)
        base, (num_columns, size) = name.removesuffix(_WEIGHT), self.shapes[name]
        group_size = self.quantization.group_size or size
        num_groups, per_word = -(-size // group_size), 32 // self.quantization.bits
        wanted = {
            f"{base}.scales": (num_groups, num_columns),
            f"{base}.qzeros": (num_groups, num_columns // per_word),
        }
        for part, shape in wanted.items():
            if self.stored.shapes.get(part) != shape:
                raise ConfigError(
                    f"tensor {part} must have shape {list(shape)}, got {self.stored.shapes.get(part)}"
                )
        words, (scales, zeros) = self.stored.read(base + _PACKED), map(self.stored.read, wanted)
        if self.quantization.method is Method.AWQ:
            return awq_weight(words, zeros, scales, group_size)[index or ...]
        group = torch.arange(size) // group_size
        if (given := f"{base}.g_idx") in self.stored.shapes:
            group = self.stored.read(given).long()
        bits, offset = self.quantization.bits, self.quantization.zero_offset
        return gptq_weight(words, zeros, scales, group, bits=bits, zero_offset=offset)[index or ...]
