"""Every option of transformers' configs is computed as transformers does, or refused."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from families import write_tiny_model
from full_attention import FullAttention
from torch import Tensor
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

from loong.core.errors import ConfigError
from loong.model.hugging_face import load_config
from loong.model.tensor_parallel import Shard, SingleDevice
from loong.model.transformer import Decoder
from loong.model.weights import load_weights

CPU = torch.device("cpu")
NUM_TOKENS = 40
TOKENS = torch.randint(97, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))
CONFIGS = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "mixtral": MixtralConfig,
    "qwen3-moe": Qwen3MoeConfig,
    "granite": GraniteConfig,
    "gemma-3": Gemma3TextConfig,
    "gpt-oss": GptOssConfig,
}

CHANGES: dict[str, list[object]] = {
    "attention_bias": [True],
    "attention_dropout": [0.5],
    "attention_multiplier": [0.25, 2],
    "attn_logit_softcapping": [50.0],
    "decoder_sparse_step": [2],
    "embedding_multiplier": [3.5],
    "eos_token_id": [-1],
    "head_dim": [16],
    "final_logit_softcapping": [30.0],
    "hidden_act": ["gelu", "swish"],
    "hidden_activation": ["silu"],
    "hidden_size": [48],
    "initializer_range": [0.5],
    "intermediate_size": [40],
    "logits_scaling": [4.0],
    "layer_types": [["full_attention"] * 2, ["full_attention", "sliding_attention"]],
    "max_position_embeddings": [64],
    "max_window_layers": [0, 1],
    "mlp_bias": [True],
    "mlp_only_layers": [[1]],
    "moe_intermediate_size": [24],
    "norm_topk_prob": [False],
    "num_attention_heads": [8],
    "num_experts_per_tok": [1],
    "num_hidden_layers": [1],
    "num_key_value_heads": [1, 4],
    "num_local_experts": [5],
    "pretraining_tp": [2],
    "query_pre_attn_scalar": [50],
    "residual_multiplier": [0.3],
    "rms_norm_eps": [0.5],
    "rope_parameters": [{"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}],
    "sliding_window": [8, 64],
    "swiglu_alpha": [1.5],
    "swiglu_limit": [0.5],
    "tie_word_embeddings": [True, False],
    "use_bidirectional_attention": [True],
    "use_cache": [False],
    "use_sliding_window": [True],
    "vocab_size": [101],
}
# Names and outputs, which are of no layer.
WITHOUT_EFFECT = {
    "_name_or_path", "_sliding_window_pattern", "architectures", "bos_token_id", "chunk_size_feed_forward",
    "dtype", "id2label", "is_encoder_decoder", "label2id", "model_type", "output_attentions",
    "output_hidden_states",
    "output_router_logits", "pad_token_id", "problem_type", "return_dict", "router_aux_loss_coef",
    "router_jitter_noise", "transformers_version",
}  # fmt: skip


REFUSED = (
    *("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"),
    *("hidden_act", "hidden_activation", "layer_types", "swiglu_alpha", "swiglu_limit"),
)
ONLY_OF = {
    **dict.fromkeys(
        ("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"),
        ("granite",),
    ),
    "num_local_experts": ("mixtral", "qwen3-moe", "gpt-oss"),
    "query_pre_attn_scalar": ("gemma-3",),
}


@pytest.mark.parametrize("family", CONFIGS)
def test_every_option_is_known_here(family: str) -> None:
    assert {*CONFIGS[family]().to_dict()} <= {*CHANGES, *WITHOUT_EFFECT}


@torch.inference_mode()
def logits(folder: Path) -> Tensor | None:
    """Return the logits of all tokens, or None if the model is refused at this length."""
    try:
        config = load_config(folder)
    except ConfigError:
        return None
    if config.max_length < NUM_TOKENS:
        return None
    shard, positions = Shard(config), torch.arange(NUM_TOKENS)
    decoder = Decoder(shard, load_weights(folder, shard, CPU), SingleDevice())
    attention = FullAttention(shard).begin(NUM_TOKENS)
    return decoder.logits(
        decoder.forward(TOKENS, positions, torch.full((NUM_TOKENS,), NUM_TOKENS), attention)
    )


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("name", CHANGES)
def test_an_option_has_the_effect_that_it_has_in_transformers(name: str, family: str, tmp_path: Path) -> None:
    for number, value in enumerate(CHANGES[name]):
        changes: dict[str, object] = {name: deepcopy(value)}  # transformers changes what it is given
        if name == "layer_types" and "sliding_attention" in str(value):
            changes |= {"use_sliding_window": True, "sliding_window": 8}
        folder = write_tiny_model(family, tmp_path / str(number), **changes)
        found = logits(folder)
        if found is None:
            assert name in REFUSED or family not in ONLY_OF.get(name, (family,))
            continue
        with torch.inference_mode():
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            wanted = model(TOKENS[None]).logits[0]
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
