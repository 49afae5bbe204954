import json
from pathlib import Path

from loong.model.config import Scales
from loong.model.hugging_face import load_config

GRANITE_3_1_2B = {  # all keys that its config.json has
    "architectures": ["GraniteForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.1,
    "attention_multiplier": 0.015625,
    "bos_token_id": 0,
    "embedding_multiplier": 12.0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "logits_scaling": 8.0,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "granite",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.46.0.dev0",
    "use_cache": True,
    "vocab_size": 49155,
}


def test_the_config_of_a_real_model_is_read_and_its_factors_are_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GRANITE_3_1_2B))
    config = load_config(tmp_path)
    assert config.scales == Scales(embedding=12.0, scores=1 / 64, residual=0.22, logit_divisor=8.0)
    assert (config.head_dim, config.tie_word_embeddings, config.dtype) == (64, True, "bfloat16")
    assert config.kv_layout().bytes_per_token == 40 * 2 * 8 * 64 * 2
