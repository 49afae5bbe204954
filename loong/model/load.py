"""Loads a decoder by the name of its model."""

from pathlib import Path

from loong.model.device import CpuDevice, Device
from loong.model.shapes import find_config
from loong.model.tensor_parallel import Shard, TensorParallel
from loong.model.transformer import Decoder
from loong.model.weights import dummy_weights, load_weights

_CPU = CpuDevice()


def load_model(
    model: str,
    load_format: str,
    dtype: str | None,
    seed: int,
    tensor_parallel: TensorParallel,
    device: Device = _CPU,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
) -> Decoder:
    """Load one rank of the decoder that `find_config` finds. `seed` is for dummy weights."""
    config = find_config(model, load_format, dtype, quantization, kv_cache_dtype)
    shard = Shard(config, tensor_parallel.rank, tensor_parallel.size)
    if load_format == "dummy":
        parameters = dummy_weights(shard, device.torch_device, seed=seed)
    elif Path(model).is_file():
        from loong.model.gguf.weights import load_gguf_weights  # only GGUF files need it

        parameters = load_gguf_weights(Path(model), shard, device.torch_device)
    else:
        parameters = load_weights(Path(model), shard, device.torch_device)
    return Decoder(shard, parameters, tensor_parallel, device)
