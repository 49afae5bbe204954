"""The names and shapes of a model's tensors, without torch."""

from loong.model.config import ModelConfig

EMBEDDING, NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor that a checkpoint of this model must have.

    Names of experts are those of Qwen3. A family whose checkpoints have others names them.
    """
    hidden = config.hidden_size
    attention, dense, sparse = _attention_shapes(config), _mlp_shapes(config), _expert_shapes(config)
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden), NORM: (hidden,)}
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        layer = attention | (sparse if config.experts_of(index) else dense)
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def _attention_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, head_dim = config.hidden_size, config.head_dim
    q, kv = config.num_heads * head_dim, config.num_kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if config.norms.has_outputs:
        shapes |= dict.fromkeys(
            ("pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"), (hidden,)
        )
    if config.has_sinks:
        shapes["self_attn.sinks"] = (config.num_heads,)
    for letter, num_rows in (("q", q), ("k", kv), ("v", kv)):
        shapes |= _linear_shapes(f"self_attn.{letter}_proj", num_rows, hidden, config.has_qkv_bias)
    shapes |= _linear_shapes("self_attn.o_proj", hidden, q, config.has_o_bias)
    if config.has_qk_norm:
        shapes |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
    return shapes


def _mlp_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return _gated_shapes("mlp", config.hidden_size, config.intermediate_size, config.has_mlp_bias)


def _expert_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    if (experts := config.experts) is None:
        return {}
    has_bias, hidden = experts.has_bias, config.hidden_size
    shapes = _linear_shapes("mlp.gate", experts.num_experts, hidden, has_bias)
    for number in range(experts.num_experts):
        shapes |= _gated_shapes(f"mlp.experts.{number}", hidden, experts.intermediate_size, has_bias)
    return shapes


def _gated_shapes(prefix: str, hidden: int, width: int, has_bias: bool) -> dict[str, tuple[int, ...]]:
    return {
        **_linear_shapes(f"{prefix}.gate_proj", width, hidden, has_bias),
        **_linear_shapes(f"{prefix}.up_proj", width, hidden, has_bias),
        **_linear_shapes(f"{prefix}.down_proj", hidden, width, has_bias),
    }


def _linear_shapes(name: str, num_rows: int, num_columns: int, has_bias: bool) -> dict[str, tuple[int, ...]]:
    weight: dict[str, tuple[int, ...]] = {f"{name}.weight": (num_rows, num_columns)}
    return weight | {f"{name}.bias": (num_rows,)} if has_bias else weight


def is_quantized(name: str) -> bool:
    """Return whether a tensor is a weight of a layer that can be quantized, which a router cannot."""
    return name.endswith("_proj.weight")
