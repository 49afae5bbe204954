"""The tensor types of a GGUF file, and their dequantization by the package `gguf`."""

from math import prod
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from loong.core.errors import ConfigError
from loong.model.gguf.header import Header

if TYPE_CHECKING:
    from gguf.constants import GGMLQuantizationType


def supported_types() -> list[str]:
    """Return the names of the types that can be dequantized, or none if `gguf` is not installed."""
    try:
        from gguf.constants import GGMLQuantizationType  # an extra
    except ImportError:
        return []
    return [ggml_type.name for ggml_type in GGMLQuantizationType if _is_supported(ggml_type)]


def check_tensors(header: Header) -> None:
    """Raise ConfigError naming a tensor that cannot be dequantized, or that the file does not hold.

    Raise it as well if `gguf` is not installed.
    """
    try:
        import gguf  # noqa: F401  an extra
    except ImportError as error:
        raise ConfigError(f"{header.path} needs the package gguf: pip install gguf ({error})") from error
    names = {info.ggml_type: name for name, info in header.tensors.items()}
    for name in names.values():
        ggml_type = _ggml_type(header, name)
        if not _is_supported(ggml_type):
            raise ConfigError(
                f"{header.path}: tensor {name} has type {ggml_type.name}, which is not supported"
            )
    for name in header.tensors:
        _raw_shape(header, name)


def _is_supported(ggml_type: "GGMLQuantizationType") -> bool:
    """Return whether a type can be dequantized, by trying zeros, because gguf has no list of these types."""
    from gguf.constants import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[ggml_type][1]), np.uint8), ggml_type)
    except NotImplementedError:
        return False
    return True


def read_tensor(
    header: Header, name: str, rows: npt.NDArray[np.int64] | None = None, expert: int | None = None
) -> npt.NDArray[np.float32]:
    """Return some rows of a tensor or of one expert in it, or all, in float32.

    Raises ConfigError if the file is cut short.
    """
    from gguf.quants import dequantize

    info = header.tensors[name]
    ggml_type, shape = _ggml_type(header, name), _raw_shape(header, name)
    try:
        raw = np.memmap(header.path, np.uint8, "r", info.offset, shape=shape)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {name} of {header.path}: {error}") from error
    if expert is not None:
        raw, shape = raw[expert], shape[1:]
    if rows is None:
        values = dequantize(raw, ggml_type)
    elif len(shape) > 1:
        values = dequantize(raw[rows], ggml_type)
    else:
        values = dequantize(raw, ggml_type)[rows]
    return np.require(values, np.float32, ["C", "W"])  # torch needs writable memory


def _raw_shape(header: Header, name: str) -> tuple[int, ...]:
    """Return the shape of a tensor's bytes. Raises ConfigError if the file does not hold them all."""
    from gguf.constants import GGML_QUANT_SIZES

    info = header.tensors[name]
    block_size, block_bytes = GGML_QUANT_SIZES[_ggml_type(header, name)]
    *outer, width = info.shape
    if width % block_size:
        raise ConfigError(f"{header.path}: rows of {name} must be multiples of {block_size}, got {width}")
    shape = (*outer, width // block_size * block_bytes)
    end = info.offset + prod(shape)
    if end > header.file_bytes:
        raise ConfigError(
            f"{header.path} has {header.file_bytes:,} bytes, but its tensor {name} ends at byte {end:,}"
        )
    return shape


def _ggml_type(header: Header, name: str) -> "GGMLQuantizationType":
    from gguf.constants import GGMLQuantizationType

    number = header.tensors[name].ggml_type
    try:
        return GGMLQuantizationType(number)
    except ValueError:
        raise ConfigError(
            f"{header.path}: tensor {name} has type {number}, which the installed gguf does not know"
        ) from None
