"""The tensors of a GGUF file under Hugging Face's names, dequantized when they are read."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loong.core.errors import ConfigError
from loong.model.config import ModelConfig
from loong.model.families.registry import FAMILIES
from loong.model.gguf.header import Header
from loong.model.gguf.quantization import check_tensors, read_tensor
from loong.model.gguf.rope import FREQUENCY_FACTORS
from loong.model.tensor_shapes import EMBEDDING, LM_HEAD, NORM

_NAMES: Final = {"token_embd.weight": EMBEDDING, "output_norm.weight": NORM, "output.weight": LM_HEAD}
_LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_EXPERT_NAMES: Final = {
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_down_exps": "down_proj",
}
_WITHOUT_KIND: Final = ("attn_sinks",)  # whose names do not end with `weight`
_EXPERT_DIMS: Final = {"weight": 3, "bias": 2}
_LAYER_TENSOR = re.compile(r"blk\.(0|[1-9][0-9]*)\.(\w+)\.(weight|bias)")


class OwnName(NamedTuple):
    """A tensor of a file, or one expert's part of it."""

    name: str
    expert: int | None


@dataclass(frozen=True, slots=True)
class GgufTensors:
    """A `TensorSource` of one file. It dequantizes only the rows that are read."""

    header: Header
    config: ModelConfig
    shapes: Mapping[str, tuple[int, ...]]
    names: Mapping[str, "OwnName"]  # in the file, by Hugging Face's

    def read(self, name: str, *index: slice) -> Tensor:
        """Return a part of a tensor in float32. Raises ConfigError if its type is not supported."""
        own_name, expert = self.names[name]
        rows = np.arange(self.shapes[name][0])[index[0] if index else slice(None)]
        own_rows = rows if expert is not None else self._own_rows(own_name)[rows]
        part = read_tensor(self.header, own_name, own_rows, expert)
        return torch.from_numpy(part)[(slice(None), *index[1:])]

    def _own_rows(self, own_name: str) -> npt.NDArray[np.int64]:
        """Return the row in the file for each row of the model, where heads may be interleaved.

        Row 2i + j of a head in the file is row i + j * D / 2 of the model's.
        """
        rows = np.arange(self.header.tensors[own_name].shape[0])
        is_rotated = re.search(r"\.attn_[qk]\.", own_name) is not None
        if not is_rotated or not FAMILIES[self.config.architecture].has_interleaved_heads:
            return rows
        return rows.reshape(-1, self.config.head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def open_gguf_tensors(header: Header, config: ModelConfig) -> GgufTensors:
    """Return the tensors of a file. Raises ConfigError naming the first one that is not supported."""
    check_tensors(header)
    names, shapes = {}, {}
    layer_names = {**_LAYER_NAMES, **FAMILIES[config.architecture].gguf_names}
    for own_name in header.tensors:
        if own_name != FREQUENCY_FACTORS:
            for name, expert in _hugging_face_names(header, own_name, layer_names):
                names[name] = OwnName(own_name, expert)
                shapes[name] = header.tensors[own_name].shape[0 if expert is None else 1 :]
    return GgufTensors(header, config, shapes, names)


def _hugging_face_names(
    header: Header, name: str, layer_names: Mapping[str, str]
) -> Iterator[tuple[str, int | None]]:
    """Yield a tensor's names in a Hugging Face folder, one for each expert that it holds.

    Raises ConfigError if it has none.
    """
    match, shape = _LAYER_TENSOR.fullmatch(name), header.tensors[name].shape
    if match is not None and match[2] in layer_names:
        kind = "" if match[2] in _WITHOUT_KIND else f".{match[3]}"
        yield f"model.layers.{match[1]}.{layer_names[match[2]]}{kind}", None
    elif match is not None and match[2] in _EXPERT_NAMES and len(shape) == _EXPERT_DIMS[match[3]]:
        for expert in range(shape[0]):
            yield f"model.layers.{match[1]}.mlp.experts.{expert}.{_EXPERT_NAMES[match[2]]}.{match[3]}", expert
    elif name in _NAMES:
        yield _NAMES[name], None
    else:
        raise ConfigError(f"{header.path} has an unexpected tensor {name} of shape {list(shape)}")
