"""The names and shapes of a model's tensors, without torch."""

from loong.model.config import ModelConfig

EMBEDDING, NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor that a checkpoint of this model must have."""
    hidden, mlp = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = {
        "self_attn.q_proj": (q, hidden, config.has_qkv_bias),
        "self_attn.k_proj": (kv, hidden, config.has_qkv_bias),
        "self_attn.v_proj": (kv, hidden, config.has_qkv_bias),
        "self_attn.o_proj": (hidden, q, config.has_o_bias),
        "mlp.gate_proj": (mlp, hidden, config.has_mlp_bias),
        "mlp.up_proj": (mlp, hidden, config.has_mlp_bias),
        "mlp.down_proj": (hidden, mlp, config.has_mlp_bias),
    }
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, (num_rows, num_columns, has_bias) in linears.items():
        layer[f"{name}.weight"] = (num_rows, num_columns)
        if has_bias:
            layer[f"{name}.bias"] = (num_rows,)
    if config.has_qk_norm:
        layer |= {
            "self_attn.q_norm.weight": (config.head_dim,),
            "self_attn.k_norm.weight": (config.head_dim,),
        }
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden), NORM: (hidden,)}
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes
