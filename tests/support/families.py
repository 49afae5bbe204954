"""Tiny random models of every supported family, written by transformers itself."""

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.utils import logging

_SIZES: dict[str, object] = {
    "vocab_size": 97,  # odd sizes, which no number of ranks divides
    "hidden_size": 32,
    "intermediate_size": 51,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}

_FAMILIES: dict[str, tuple[type, dict[str, object]]] = {
    "llama": (LlamaConfig, {}),
    "llama-mha": (LlamaConfig, {"num_key_value_heads": 4}),
    "llama-tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "llama-biased": (LlamaConfig, {"attention_bias": True, "mlp_bias": True, "head_dim": 10}),
    "llama-linear": (
        LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama-dynamic": (LlamaConfig, {"rope_parameters": _DYNAMIC, "max_position_embeddings": 24}),
    "llama-3.1": (LlamaConfig, {"rope_parameters": _LLAMA3}),
    "llama-yarn": (LlamaConfig, {"rope_parameters": _YARN}),
    "lwm": (
        LlamaConfig,
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 1048576,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e7},
        },
    ),
    "mistral": (MistralConfig, {"sliding_window": 7}),  # of every layer
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {"head_dim": 12}),
    "qwen3-moe": (
        Qwen3MoeConfig,
        {
            "head_dim": 12,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,  # of which torch multiplies groups
            "norm_topk_prob": True,
        },
    ),
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "intermediate_size": 52}),
    "gemma-3": (
        Gemma3TextConfig,
        {
            "sliding_window_pattern": 2,
            "head_dim": 12,
            "query_pre_attn_scalar": 10,
            "sliding_window": 9,
            "tie_word_embeddings": True,
        },
    ),
    "gpt-oss": (
        GptOssConfig,
        {
            "head_dim": 12,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "intermediate_size": 20,
            "sliding_window": 9,
            "rope_parameters": {**_YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        },
    ),
    "granite": (
        GraniteConfig,
        {
            "embedding_multiplier": 1.75,
            "attention_multiplier": 0.625,
            "residual_multiplier": 0.375,
            "logits_scaling": 1.25,
        },
    ),
}
FAMILIES = tuple(_FAMILIES)
# Models of a fixture `folder`: one whose rotations depend on lengths, and one with windows and sinks.
each_kind = pytest.mark.parametrize("folder", ["llama-dynamic", "gpt-oss"], indirect=True)


def write_tiny_model(family: str, folder: Path, **overrides: object) -> Path:
    """Write a random float32 model of `family` in Hugging Face's format and return `folder`.

    `overrides` are fields of its config. Every tensor is random, norms and biases too, and large enough
    that logits spread by about 1.
    """
    config_class, fields = _FAMILIES[family]
    config = config_class(**{**_SIZES, **fields, **overrides})
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(len(family))
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            center = 1.0 if name.endswith("norm.weight") and family != "gemma-3" else 0.0
            parameter.normal_(center, 0.25, generator=generator)
    model.save_pretrained(folder)
    return folder
