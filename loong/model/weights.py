"""Weights from a folder of safetensors files, or from a seed."""

import hashlib
import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from loong.core.errors import ConfigError
from loong.foreign_json import NOT_JSON
from loong.model.config import ModelConfig
from loong.model.families.registry import FAMILIES
from loong.model.parameters import Parameters, assemble
from loong.model.quantization.config import Method, Quantization
from loong.model.quantization.sources import QuantizedAtLoad, dequantized
from loong.model.stacked_experts import StackedExperts
from loong.model.tensor_parallel import Shard
from loong.model.tensor_shapes import expected_shapes
from loong.model.tensor_source import TensorSource

_BASE, _PARTS_OF_BASE = "model.", ("embed_tokens.", "layers.", "norm.")
_FLOATS = ("F64", "F32", "F16", "BF16")
_FP8 = "F8_E4M3"
_QUANTIZED = (_FP8, "I32", "U8")  # of checkpoints that are quantized


def load_weights(
    folder: Path, shard: Shard, device: torch.device, *, keeps_fp8: bool | None = None
) -> Parameters:
    """Load one rank's weights from `model.safetensors`, else the files of `model.safetensors.index.json`.

    For `keeps_fp8` see `assemble`. It reads only this rank's parts. Raises ConfigError naming the file or the
    tensor at fault.
    """
    with ExitStack() as open_files:
        names = FAMILIES[shard.config.architecture].tensor_names
        checkpoint = _open_checkpoint(folder, open_files, names, shard.config.quantization)
        tensors = _model_tensors(checkpoint, shard.config)
        return assemble(shard, tensors, device, keeps_fp8=keeps_fp8)


def dummy_weights(shard: Shard, device: torch.device, *, seed: int = 0) -> Parameters:
    """Make one rank's weights from a seed. The whole model is the same for any number of ranks."""
    shapes = expected_shapes(shard.config)
    tensors = RandomTensors(shapes, seed, shard.config.torch_dtype, device)
    return assemble(shard, tensors if shard.config.quantization is None else QuantizedAtLoad(tensors), device)


@dataclass(frozen=True, slots=True)
class RandomTensors:
    """Tensors made on demand, each whole and from its own seed, so that parts are independent.

    Norms are ones. All others are uniform with variance 1 / columns, sampled in [0, 1) and then shifted. So
    every CPU gets the same bits, unlike with normal samples; a GPU gets others.
    """

    shapes: Mapping[str, tuple[int, ...]]
    seed: int
    dtype: torch.dtype
    device: torch.device

    def read(self, name: str, *index: slice) -> Tensor:
        """Return a part of a tensor."""
        shape = self.shapes[name]
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        if name.endswith("norm.weight"):
            return tensor.fill_(1.0)[index]
        digest = hashlib.blake2b(f"{self.seed} {name}".encode(), digest_size=8).digest()
        generator = torch.Generator(self.device).manual_seed(int.from_bytes(digest) >> 1)
        width = math.sqrt(12 / shape[-1])
        return tensor.uniform_(generator=generator).sub_(0.5).mul_(width)[index]


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """The tensors of some open safetensors files."""

    shapes: dict[str, tuple[int, ...]]
    paths: dict[str, Path]
    files: dict[Path, safe_open]
    own_names: dict[str, str]  # in their files
    fp8_names: set[str] = field(default_factory=set)

    def is_fp8(self, name: str) -> bool:
        return name in self.fp8_names

    def read(self, name: str, *index: slice) -> Tensor:
        path = self.paths[name]
        try:
            whole = self.files[path].get_slice(self.own_names[name])  # type: ignore[no-untyped-call]
            part: Tensor = whole[index or ...]
        except SafetensorError as error:
            raise ConfigError(f"cannot read {name} of {path}: {error}") from error
        return part


def _model_tensors(checkpoint: "_Checkpoint", config: ModelConfig) -> TensorSource:
    """Return the tensors under the names of a model that is not quantized, an expert's apart.

    Raises ConfigError if experts are in MXFP4 that are not stacked.
    """
    quantization = config.quantization
    is_stacked = config.experts is not None and config.experts.is_stacked
    source: TensorSource = StackedExperts(checkpoint) if is_stacked else checkpoint
    if quantization is None or (is_stacked and quantization.method is Method.MXFP4):
        return source
    if not quantization.is_stored:
        return QuantizedAtLoad(source)
    if is_stacked or quantization.method is Method.MXFP4:
        raise ConfigError(f"{config.architecture} with weights of {quantization} is not supported")
    return dequantized(checkpoint, quantization)


def _open_checkpoint(
    folder: Path, open_files: ExitStack, names: Mapping[str, str], quantization: Quantization | None
) -> _Checkpoint:
    checkpoint = _Checkpoint({}, {}, {}, {})
    is_quantized = quantization is not None and quantization.is_stored
    dtypes = _FLOATS + _QUANTIZED if is_quantized else _FLOATS
    for path in _checkpoint_paths(folder):
        try:
            file = open_files.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from error
        checkpoint.files[path] = file
        for own_name in file.keys():  # noqa: SIM118 - not a mapping
            part, name = file.get_slice(own_name), our_name(own_name, names)
            if part.get_dtype() not in dtypes:
                raise ConfigError(
                    f"{name} of {path} must be one of {', '.join(dtypes)}, got {part.get_dtype()}"
                )
            if part.get_dtype() == _FP8:
                checkpoint.fp8_names.add(name)
            if name in checkpoint.shapes:
                raise ConfigError(f"{path} has {own_name}, but {name} is in {checkpoint.paths[name]}, too")
            checkpoint.own_names[name] = own_name
            checkpoint.shapes[name] = tuple(part.get_shape())
            checkpoint.paths[name] = path
    return checkpoint


def our_name(name: str, parts: Mapping[str, str]) -> str:
    """Return our name of a tensor, given that of each part. Checkpoints without a head have shorter ones."""
    whole = f"{_BASE}{name}" if name.startswith(_PARTS_OF_BASE) else name
    return ".".join(parts.get(part, part) for part in whole.split(".")) if parts else whole


def _checkpoint_paths(folder: Path) -> list[Path]:
    """Return the files with weights: the single one, or else those of an index."""
    path = folder / "model.safetensors"
    if path.exists():
        return [path]
    index_path = folder / "model.safetensors.index.json"
    if index_path.exists():
        try:
            index = msgspec.json.decode(index_path.read_bytes(), type=_Index)
        except (OSError, *NOT_JSON) as error:
            raise ConfigError(f"cannot read {index_path}: {error}") from error
        return [folder / name for name in sorted(set(index.weight_map.values()))]
    raise ConfigError(
        f"{folder} must contain model.safetensors or {index_path.name}: no other format is supported"
    )


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]
