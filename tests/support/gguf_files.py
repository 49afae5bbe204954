"""GGUF files of tiny random models, written by the `gguf` package, and folders with the same weights."""

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from expert_stacks import as_in_checkpoint, stacked_experts
from families import write_tiny_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

_BLOCK: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
}  # rows of whole blocks of 32
_SIZES: dict[str, dict[str, object]] = {  # besides, of rows of experts, and what such files do not say
    "qwen3-moe": {"moe_intermediate_size": 32},
    "gemma-3": {"query_pre_attn_scalar": 16, "num_hidden_layers": 7, "sliding_window_pattern": 6},
}
_ARCHITECTURES = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "MistralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
    "Qwen3MoeForCausalLM": gguf.MODEL_ARCH.QWEN3MOE,
    "MixtralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "GraniteForCausalLM": gguf.MODEL_ARCH.GRANITE,
    "Gemma3ForCausalLM": gguf.MODEL_ARCH.GEMMA3,
    "GptOssForCausalLM": gguf.MODEL_ARCH.GPT_OSS,
}
_INTERLEAVED = (gguf.MODEL_ARCH.LLAMA, gguf.MODEL_ARCH.GRANITE)
TEXT = "The cat sat on the mat, 1234 times; it's what cats do.\n\n  They say naïve café, 日本語 too."


def write_gguf(
    family: str, folder: Path, quantization: str = "F32", **overrides: object
) -> tuple[Path, Path]:
    """Write a tiny model of `family` as a GGUF file; return it and a folder with its dequantized weights.

    Matrices are of the type `quantization`, everything else is in float32.
    """
    original = write_tiny_model(family, folder / "original", **_BLOCK, **_SIZES.get(family, {}))
    config = json.loads((original / "config.json").read_text())
    architecture = _ARCHITECTURES[config["architectures"][0]]
    path, reference = folder / f"{family}-{quantization}.gguf", folder / "reference"
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _write_config(writer, config)
    if architecture is gguf.MODEL_ARCH.GPT_OSS:
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    write_tokenizer(writer, "gpt-2", config["vocab_size"])
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    dequantized = {}
    tensors = load_file(original / "model.safetensors")
    for name, tensor in stacked_experts(tensors).items():
        own_name = names.get_name(name, (".weight", ".bias"))
        assert own_name is not None
        own_name += ".weight" if name.endswith("sinks") else ""
        is_matrix = tensor.ndim > 1 and name.endswith("weight")
        own_type = gguf.GGMLQuantizationType[quantization if is_matrix else "F32"]
        values = tensor.numpy()
        if architecture is gguf.MODEL_ARCH.GEMMA3 and name.endswith("norm.weight"):
            writer.add_tensor(own_name, values + 1)
            dequantized[name] = tensor
            continue
        if architecture in _INTERLEAVED and ("q_proj" in name or "k_proj" in name):
            values = _interleaved(values, config["head_dim"])
        quantized = gguf.quantize(values, own_type)
        writer.add_tensor(own_name, quantized, raw_dtype=own_type)
        values = gguf.dequantize(quantized, own_type).reshape(tensor.shape)
        if architecture in _INTERLEAVED and ("q_proj" in name or "k_proj" in name):
            values = _halved(values, config["head_dim"])
        dequantized[name] = torch.from_numpy(np.array(values, np.float32))
    finish(writer)
    reference.mkdir()
    (reference / "config.json").write_text(json.dumps(config))
    kept = as_in_checkpoint(tensors, dequantized)
    save_file(kept, reference / "model.safetensors", metadata={"format": "pt"})
    return path, reference


def write_reference(path: Path, config: LlamaConfig, folder: Path) -> Path:
    """Write the tensors of a llama's GGUF file, as `gguf` reads them, in Hugging Face's format."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    own_names = {}
    for name in LlamaForCausalLM(config).state_dict():
        own_names[names.get_name(name, (".weight", ".bias"))] = name
    tensors = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        name = own_names[tensor.name]
        if "q_proj" in name or "k_proj" in name:
            values = _halved(values, config.hidden_size // config.num_attention_heads)
        tensors[name] = torch.from_numpy(np.array(values, np.float32))
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def finish(writer: gguf.GGUFWriter) -> None:
    """Write all that was added to the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_tokenizer(writer: gguf.GGUFWriter, pre: str, vocab_size: int) -> None:
    """Add a byte-level tokenizer that is trained on a few words; tokens 0 to 2 are special."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<unk>", "<s>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if vocab_size > 300 else [],
        show_progress=False,
    )
    backend.train_from_iterator([TEXT] * 9, trainer)
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)[:vocab_size]
    tokens += [f"[PAD{i}]" for i in range(len(tokens), vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3))
    kept = [merge for merge in model["merges"] if "".join(merge) in tokens]
    writer.add_token_merges([" ".join(merge) for merge in kept])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")


def _write_config(writer: gguf.GGUFWriter, config: dict[str, object]) -> None:
    def size(name: str) -> int:
        value = config[name]
        assert isinstance(value, int)
        return value

    writer.add_context_length(size("max_position_embeddings"))
    writer.add_embedding_length(size("hidden_size"))
    writer.add_block_count(size("num_hidden_layers"))
    writer.add_feed_forward_length(size("intermediate_size"))
    for key, add_size in (
        ("num_local_experts", writer.add_expert_count),
        ("num_experts_per_tok", writer.add_expert_used_count),
        ("moe_intermediate_size", writer.add_expert_feed_forward_length),
    ):
        if key in config:
            add_size(size(key))
    writer.add_head_count(size("num_attention_heads"))
    writer.add_head_count_kv(size("num_key_value_heads"))
    writer.add_key_length(size("head_dim"))
    writer.add_value_length(size("head_dim"))
    writer.add_layer_norm_rms_eps(float(str(config["rms_norm_eps"])))
    for key, add in (
        ("embedding_multiplier", writer.add_embedding_scale),
        ("attention_multiplier", writer.add_attention_scale),
        ("residual_multiplier", writer.add_residual_scale),
        ("logits_scaling", writer.add_logit_scale),
    ):
        if isinstance(scale := config.get(key), float):
            add(scale)
    if config.get("sliding_window"):
        writer.add_sliding_window(size("sliding_window"))
    rope = config["rope_parameters"]
    assert isinstance(rope, dict)
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if "original_max_position_embeddings" in rope:
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _interleaved(values: np.ndarray, head_dim: int) -> np.ndarray:
    """Put the two halves of each head's rows side by side, as llama.cpp's converter does."""
    halves = values.reshape(-1, 2, head_dim // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def _halved(values: np.ndarray, head_dim: int) -> np.ndarray:
    """Undo `_interleaved`."""
    pairs = values.reshape(-1, head_dim // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
