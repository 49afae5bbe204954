"""A model's config from the metadata of a GGUF file, under the key names of llama.cpp."""

from collections.abc import Mapping
from dataclasses import replace

from loong.core.errors import ConfigError
from loong.model.config import ModelConfig, Scales
from loong.model.expert_config import ExpertConfig
from loong.model.families.registry import GGUF_FAMILIES
from loong.model.gguf.header import Header
from loong.model.gguf.keys import check_keys
from loong.model.gguf.metadata import Metadata
from loong.model.gguf.rope import read_rope
from loong.model.gguf.tokenizer import CONTROL

_END_OF_TURN = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "</s>"),
    *("<end_of_turn>", "<|return|>", "<|call|>"),
)


def gguf_config(header: Header) -> ModelConfig:
    """Return the config of a file, in float32, the dtype of its dequantized tensors.

    Raises ConfigError naming the key at fault, its value and the supported values.
    """
    metadata = Metadata(header)
    prefix = metadata.architecture
    family = GGUF_FAMILIES.get(prefix)
    if family is None:
        raise metadata.refusal("general.architecture", f"one of {', '.join(GGUF_FAMILIES)}")
    check_keys(metadata, family)
    hidden_size = metadata.size(f"{prefix}.embedding_length")
    vocab_size = _vocab_size(header)
    num_heads = metadata.size(f"{prefix}.attention.head_count")
    head_dim = metadata.size(f"{prefix}.attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if metadata.size(f"{prefix}.{key}", head_dim) != head_dim:
            raise metadata.refusal(f"{prefix}.{key}", f"the head dimension, {head_dim}")
    config = ModelConfig(
        architecture=family.architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=metadata.size(f"{prefix}.feed_forward_length"),
        num_layers=metadata.size(f"{prefix}.block_count"),
        num_heads=num_heads,
        num_kv_heads=metadata.size(f"{prefix}.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position_embeddings=metadata.size(f"{prefix}.context_length"),
        rope=read_rope(metadata, header, head_dim),
        dtype="float32",
        rms_norm_eps=metadata.required(f"{prefix}.attention.layer_norm_rms_epsilon", float),
        tie_word_embeddings="output.weight" not in header.tensors,
        bos_token_id=metadata.optional("tokenizer.ggml.bos_token_id", int),
        eos_token_ids=_eos_token_ids(metadata),
    )
    first_layer = {name.removeprefix("blk.0.") for name in header.tensors if name.startswith("blk.0.")}
    found = replace(
        config,
        scales=_scales(metadata, family.gguf_scales),
        experts=_experts(metadata, header, config),
        has_qkv_bias="attn_q.bias" in first_layer,
        has_o_bias="attn_output.bias" in first_layer,
        has_mlp_bias="ffn_gate.bias" in first_layer,
        has_qk_norm="attn_q_norm.weight" in first_layer,
        sliding_window=metadata.optional(f"{prefix}.attention.sliding_window", int) or None,
    )
    return found if family.of_gguf is None else family.of_gguf(found)


def _scales(metadata: Metadata, names: Mapping[str, str]) -> Scales:
    """Return the scales of a file, whose keys have these `names` here."""
    prefix = metadata.architecture
    found = {name: metadata.optional(f"{prefix}.{key}", float) for key, name in names.items()}
    return Scales(**{name: scale for name, scale in found.items() if scale})  # 0 means none, too


def _vocab_size(header: Header) -> int:
    shape = header.tensors["token_embd.weight"].shape if "token_embd.weight" in header.tensors else ()
    if len(shape) != 2:
        raise ConfigError(f"{header.path} must have a tensor token_embd.weight of 2 dimensions, got {shape}")
    return shape[0]


def _experts(metadata: Metadata, header: Header, config: ModelConfig) -> ExpertConfig | None:
    """Return the experts of a file, or None. Layers without a router have one MLP."""
    prefix, tensors = metadata.architecture, header.tensors
    if not metadata.optional(f"{prefix}.expert_count", int):
        return None
    layers = range(config.num_layers)
    return ExpertConfig(
        num_experts=metadata.size(f"{prefix}.expert_count"),
        num_chosen=metadata.size(f"{prefix}.expert_used_count"),
        intermediate_size=metadata.size(f"{prefix}.expert_feed_forward_length", config.intermediate_size),
        dense_layers=frozenset(n for n in layers if f"blk.{n}.ffn_gate_inp.weight" not in tensors),
    )


def _eos_token_ids(metadata: Metadata) -> tuple[int, ...]:
    """Return the ids that the metadata names as ends, and the control tokens whose text ends a turn."""
    named = [metadata.optional(f"tokenizer.ggml.{name}_token_id", int) for name in ("eos", "eot", "eom")]
    tokens = metadata.items("tokenizer.ggml.tokens", str)
    types = metadata.items("tokenizer.ggml.token_type", int)
    by_text = [
        token_id
        for token_id, (token, token_type) in enumerate(zip(tokens, types, strict=False))
        if token_type == CONTROL and token in _END_OF_TURN
    ]
    return tuple(
        sorted({token_id for token_id in (*named, *by_text) if token_id is not None and token_id >= 0})
    )
