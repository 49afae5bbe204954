"""One rank's weights from a GGUF file."""

from pathlib import Path

import torch

from loong.model.gguf.header import read_header
from loong.model.gguf.tensors import open_gguf_tensors
from loong.model.parameters import Parameters, assemble
from loong.model.tensor_parallel import Shard


def load_gguf_weights(path: Path, shard: Shard, device: torch.device) -> Parameters:
    """Dequantize one rank's weights, tensor by tensor, into the model's dtype.

    Raises ConfigError naming the file or the tensor at fault.
    """
    return assemble(shard, open_gguf_tensors(read_header(path), shard.config), device)
