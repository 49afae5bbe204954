"""The tensors of a GGUF file under Hugging Face's names, dequantized when they are read."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

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
}
_LAYER_TENSOR = re.compile(r"blk\.(0|[1-9][0-9]*)\.(\w+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class GgufTensors:
    """A `TensorSource` of one file. It dequantizes only the rows that are read."""

    header: Header
    config: ModelConfig
    shapes: Mapping[str, tuple[int, ...]]
    names: Mapping[str, str]  # in the file, by Hugging Face's

    def read(self, name: str, *index: slice) -> Tensor:
        """Return a part of a tensor in float32. Raises ConfigError if its type is not supported."""
        own_name = self.names[name]
        rows = np.arange(self.shapes[name][0])[index[0] if index else slice(None)]
        part = read_tensor(self.header, own_name, self._own_rows(own_name)[rows])
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
    names = {_hugging_face_name(header, name): name for name in header.tensors if name != FREQUENCY_FACTORS}
    shapes = {name: header.tensors[own_name].shape for name, own_name in names.items()}
    return GgufTensors(header, config, shapes, names)


def _hugging_face_name(header: Header, name: str) -> str:
    """Return a tensor's name in a Hugging Face folder. Raises ConfigError if it has none."""
    match = _LAYER_TENSOR.fullmatch(name)
    if match is not None and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    if name in _NAMES:
        return _NAMES[name]
    shape = list(header.tensors[name].shape)
    raise ConfigError(f"{header.path} has an unexpected tensor {name} of shape {shape}")
