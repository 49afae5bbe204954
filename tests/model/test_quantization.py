"""Quantized checkpoints are the models that their dequantized weights make."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from families import write_tiny_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from loong.core.errors import ConfigError
from loong.kernels.fp8_rows import FP8
from loong.model.device import CpuDevice
from loong.model.expert_weight import DenseExperts
from loong.model.hugging_face import load_config
from loong.model.mlp import ExpertMLP, GatedMLP
from loong.model.parameters import Parameters
from loong.model.quantization.config import parse_quantization
from loong.model.quantization.fp8 import Fp8Matrix, quantized_rows
from loong.model.shapes import find_config
from loong.model.tensor_parallel import Shard
from loong.model.tensor_shapes import is_quantized
from loong.model.weights import load_weights

CPU = torch.device("cpu")
SIZES = {"hidden_size": 64, "intermediate_size": 160, "moe_intermediate_size": 160, "head_dim": 16}
Tensors = dict[str, Tensor]
Quantize = Callable[[str, Tensor], tuple[Tensors, Tensor]]


def channels(base: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    values, scales, _ = quantized = quantized_rows(weight)
    return {f"{base}.weight": values, f"{base}.weight_scale": scales}, quantized.dequantized()


def tensors(base: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    scale = weight.abs().max() / 448
    values = (weight / scale).to(FP8)
    return {f"{base}.weight": values, f"{base}.weight_scale": scale.view(1)}, values.float() * scale


def blocks(base: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    num_rows, num_columns = weight.shape
    row, column = torch.arange(num_rows) // 128, torch.arange(num_columns) // 128
    scales = (
        torch.rand(int(row[-1]) + 1, int(column[-1]) + 1, generator=torch.Generator().manual_seed(1)) / 400
        + 1e-3
    )
    values = (weight / scales[row][:, column]).to(FP8)
    parts = {f"{base}.weight": values, f"{base}.weight_scale_inv": scales}
    return parts, values.float() * scales[row][:, column]


def packed(integers: Tensor, bits: int) -> Tensor:
    """Pack the last dim, the lowest bits first."""
    per_word = 32 // bits
    shifts = torch.arange(per_word) * bits
    words = (integers.long().reshape(*integers.shape[:-1], -1, per_word) << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def integers(weight: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return values [N, K], zeros [N, G], scales [N, G], and the group [K] of each column."""
    generator = torch.Generator().manual_seed(1)
    group = torch.arange(weight.shape[1]) // group_size
    shape = len(weight), int(group[-1]) + 1
    values = torch.randint(0, 1 << bits, weight.shape, generator=generator)
    zeros = torch.randint(1, 1 << bits, shape, generator=generator)
    return values, zeros, torch.rand(shape, generator=generator).half() / 20, group


def awq(base: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    values, zeros, scales, group = integers(weight, 4, 32)
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # the column at each place of a word
    words, zero_words = (
        packed(given.T.reshape(given.shape[1], -1, 8)[..., order].flatten(-2), 4) for given in (values, zeros)
    )
    parts = {f"{base}.qweight": words, f"{base}.qzeros": zero_words, f"{base}.scales": scales.T.contiguous()}
    return parts, (values - zeros[:, group]) * scales.float()[:, group]


def gptq(base: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    values, zeros, scales, group = integers(weight, 4, 32)
    group = group[torch.randperm(len(group), generator=torch.Generator().manual_seed(2))]  # act order
    parts = {
        f"{base}.qweight": packed(values, 4).T.contiguous(),
        f"{base}.qzeros": packed(zeros.T - 1, 4),
        f"{base}.scales": scales.T.contiguous(),
        f"{base}.g_idx": group.to(torch.int32),
    }
    return parts, (values - zeros[:, group]) * scales.float()[:, group]


COMPRESSED: dict[str, object] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        }
    },
}
BLOCKS: dict[str, object] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
}
FORMATS: dict[str, tuple[Quantize, dict[str, object]]] = {
    "channels": (channels, COMPRESSED),
    "tensors": (tensors, {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "blocks": (blocks, BLOCKS),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}),
}


def write_quantized(family: str, form: str, folder: Path) -> tuple[Path, Path]:
    """Write a tiny quantized model, and the same with dequantized weights."""
    quantize, quantization = FORMATS[form]
    plain = write_tiny_model(family, folder / "plain", **SIZES)
    config = json.loads((plain / "config.json").read_text())
    stored, dequantized = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if not is_quantized(name):
            stored[name] = dequantized[name] = tensor
            continue
        parts, dequantized[name] = quantize(name.removesuffix(".weight"), tensor)
        stored |= parts
    (folder / "quantized").mkdir()
    (folder / "quantized/config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    save_file(
        {name: tensor.contiguous() for name, tensor in stored.items()}, folder / "quantized/model.safetensors"
    )
    save_file(
        {name: tensor.contiguous() for name, tensor in dequantized.items()}, plain / "model.safetensors"
    )
    return folder / "quantized", plain


def assert_same(found: Parameters, wanted: Parameters) -> None:
    """Compare all weights of layers. Those in FP8 are dequantized."""
    for layer, wanted_layer in zip(found.layers, wanted.layers, strict=True):
        pairs = [(layer.qkv, wanted_layer.qkv), (layer.o, wanted_layer.o)]
        for mlp in (layer.mlp, wanted_layer.mlp):
            assert isinstance(mlp, (GatedMLP, ExpertMLP))
        pairs += [(layer.mlp.gate_up, wanted_layer.mlp.gate_up), (layer.mlp.down, wanted_layer.mlp.down)]  # type: ignore[attr-defined]  # checked above
        for weight, wanted_weight in pairs:
            matrix = weight.weight.dequantized() if isinstance(weight.weight, Fp8Matrix) else weight.weight  # type: ignore[attr-defined]  # all have it
            torch.testing.assert_close(matrix, wanted_weight.weight)  # type: ignore[attr-defined]  # all have it


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_a_quantized_model_is_the_one_of_its_dequantized_weights(
    family: str, form: str, tmp_path: Path
) -> None:
    quantized, plain = write_quantized(family, form, tmp_path)
    config = load_config(quantized)
    for rank, size in (0, 1), (1, 2):
        shard = Shard(config, rank, size)
        wanted = load_weights(plain, Shard(load_config(plain), rank, size), CPU)
        assert_same(load_weights(quantized, shard, CPU), wanted)
        if form == "blocks" and size == 2:  # of 160 columns
            with pytest.raises(ConfigError, match="cannot be cut at column 32, within a block"):
                load_weights(quantized, shard, CPU, keeps_fp8=True)
        else:
            assert_same(load_weights(quantized, shard, CPU, keeps_fp8=True), wanted)


def test_products_of_fp8_are_close_to_those_of_their_weights(tmp_path: Path) -> None:
    quantized, plain = write_quantized("qwen3-moe", "blocks", tmp_path)
    shard = Shard(load_config(quantized))
    kept, expected = load_weights(quantized, shard, CPU, keeps_fp8=True), load_weights(plain, shard, CPU)
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    for layer, wanted in zip(kept.layers, expected.layers, strict=True):
        torch.testing.assert_close(
            layer.qkv.apply(x, CpuDevice()), wanted.qkv.apply(x, CpuDevice()), atol=0.5, rtol=0.05
        )
        found = layer.mlp.apply(x, CpuDevice())
        assert (found - wanted.mlp.apply(x, CpuDevice())).norm() < 0.1 * found.norm()


def test_weights_quantized_at_load_have_the_scales_of_whole_rows_on_every_rank(tmp_path: Path) -> None:
    folder = write_tiny_model("qwen3-moe", tmp_path, **SIZES)
    config = find_config(str(folder), quantization="fp8")
    plain = load_file(folder / "model.safetensors")
    dequantized = {
        name: quantized_rows(tensor).dequantized() if is_quantized(name) else tensor
        for name, tensor in plain.items()
    }
    save_file(dequantized, folder / "model.safetensors")
    wanted = [load_weights(folder, Shard(find_config(str(folder)), rank, 2), CPU) for rank in (0, 1)]
    save_file(plain, folder / "model.safetensors")
    for rank in (0, 1):
        for keeps_fp8 in (False, True):
            assert_same(load_weights(folder, Shard(config, rank, 2), CPU, keeps_fp8=keeps_fp8), wanted[rank])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "quant_method 'bitsandbytes' is not supported, only compressed-tensors",
        ),
        ({**BLOCKS, "weight_block_size": [64, 64]}, r"blocks of \[64, 64\], not 128 x 128, is not supported"),
        ({**BLOCKS, "activation_scheme": "static"}, "activation_scheme 'static' is not supported"),
        ({**COMPRESSED, "format": "pack-quantized"}, "format 'pack-quantized' is not supported"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "bits 3 is not supported"),
        ({"quant_method": "awq", "bits": 4, "group_size": 0}, "group_size 0 is not supported"),
    ],
)
def test_what_is_not_supported_is_refused_with_the_list(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_quantization("config.json", given)


@pytest.mark.parametrize("rank", [0, 1])
def test_experts_in_mxfp4_have_the_values_that_transformers_gives_them(tmp_path: Path, rank: int) -> None:
    folders = [write_tiny_model("gpt-oss", tmp_path / n, intermediate_size=64) for n in ("plain", "packed")]
    plain, packed = (load_file(folder / "model.safetensors") for folder in folders)
    generator = torch.Generator().manual_seed(1)
    for name, stack in list(packed.items()):
        if name.endswith(("gate_up_proj", "down_proj")):
            num_experts, num_columns, num_rows = stack.shape
            shape = num_experts, num_rows, num_columns // 32
            blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(120, 128, shape, generator=generator, dtype=torch.uint8)
            plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
            del packed[name]
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    configs = []
    for folder, tensors in zip(folders, (plain, packed), strict=True):
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folders[1] / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folders[1] / "config.json").write_text(json.dumps(config))
    for folder in folders:
        shard = Shard(load_config(folder), rank, 2)
        configs.append([layer.mlp for layer in load_weights(folder, shard, CPU).layers])
    for mlp, other in zip(*configs, strict=True):
        assert isinstance(mlp, ExpertMLP)
        assert isinstance(other, ExpertMLP)
        for weight, same in ((mlp.gate_up, other.gate_up), (mlp.down, other.down)):
            assert isinstance(weight, DenseExperts)
            assert isinstance(same, DenseExperts)
            assert torch.equal(weight.weight, same.weight)
