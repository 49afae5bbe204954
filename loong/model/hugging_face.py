"""The config files of a Hugging Face folder, and checks of unsupported options."""

from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar

import msgspec

from loong.core.errors import ConfigError
from loong.foreign_json import NOT_JSON
from loong.model.rope_config import RopeConfig, parse_rope

Architecture = Literal["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
ARCHITECTURES: tuple[Architecture, ...] = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)

_MODEL_TYPES: Final[dict[Architecture, str]] = {  # by which transformers chooses the computation
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
# Options that change the computation of other models, with the values that change nothing, besides null.
OPTIONS_OF_OTHERS: Final[dict[str, tuple[object, ...]]] = {
    **dict.fromkeys(("alibi", "is_encoder_decoder", "parallel_attn", "rope_interleaved"), (False,)),
    **dict.fromkeys(("qk_layernorm", "qk_norm", "use_bidirectional_attention", "use_qk_norm"), (False,)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "logit_softcapping"), (0,)),
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts"), (0,)),
    **dict.fromkeys(("embedding_multiplier", "logit_scale", "logits_scaling", "residual_multiplier"), (1,)),
    **dict.fromkeys(("mup_width_scale", "scale_emb"), (1,)),
    **dict.fromkeys(("attention_chunk_size", "attention_multiplier", "clip_qkv", "dim_model_base"), ()),
    **dict.fromkeys(("no_rope_layer_interval", "query_pre_attn_scalar", "scale_depth"), ()),
    "hidden_act": ("silu", "swish"),
    "hidden_activation": ("silu", "swish"),
    "is_causal": (True,),
    "no_rope_layers": ([],),
}
_FULL, _SLIDING = "full_attention", "sliding_attention"

_Size = Annotated[int, msgspec.Meta(gt=0)]
_TokenIds = int | list[int] | None
_File = TypeVar("_File")


class _Kind(msgspec.Struct, frozen=True):
    """The fields that decide whether config.json can be read."""

    architectures: list[str] | None = None
    model_type: str | None = None
    quantization_config: dict[str, object] | None = None


class ConfigFile(msgspec.Struct, frozen=True, kw_only=True):
    """config.json of any of ARCHITECTURES; defaults are those of transformers."""

    architectures: list[Architecture]
    vocab_size: _Size
    hidden_size: _Size
    intermediate_size: _Size
    num_hidden_layers: _Size
    num_attention_heads: _Size
    num_key_value_heads: _Size | None = None
    head_dim: _Size | None = None
    max_position_embeddings: _Size
    original_max_position_embeddings: _Size | None = None
    rope_parameters: dict[str, object] | None = None
    rope_scaling: dict[str, object] | None = None
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = 4096
    use_sliding_window: bool = False
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    bos_token_id: int | None = None
    eos_token_id: _TokenIds = None

    @property
    def architecture(self) -> Architecture:
        """The first, and in practice only, of `architectures`."""
        return self.architectures[0]

    @property
    def rope(self) -> RopeConfig:
        """The rotary embedding, from the new layout or the old one.

        The old one has priority, as in transformers.
        """
        parameters = dict(self.rope_scaling or self.rope_parameters or {})
        if self.original_max_position_embeddings is not None:
            parameters["original_max_position_embeddings"] = self.original_max_position_embeddings
        if self.partial_rotary_factor is not None:
            parameters.setdefault("partial_rotary_factor", self.partial_rotary_factor)
        return parse_rope(
            parameters, rope_theta=self.rope_theta, max_position_embeddings=self.max_position_embeddings
        )

    @property
    def layered_sliding_window(self) -> int | None:
        """Qwen's sliding window, which it enables by layer; None if no layer has it."""
        if self.layer_types is not None:
            is_used = _SLIDING in self.layer_types
        else:
            is_used = self.max_window_layers < self.num_hidden_layers
        return self.sliding_window if self.use_sliding_window and is_used else None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The end-of-sequence ids. Those of generation_config.json have priority."""
        return _as_tuple(self.eos_token_id)


class _GenerationFile(msgspec.Struct, frozen=True):
    eos_token_id: _TokenIds = None


def read_config_file(folder: Path) -> ConfigFile:
    """Read `config.json`. Raises ConfigError naming the key, its value and the supported values."""
    path = folder / "config.json"
    kind = _read(path, _Kind)
    if not kind.architectures or kind.architectures[0] not in ARCHITECTURES:
        raise ConfigError(
            f"{path}: architectures must start with one of {', '.join(ARCHITECTURES)}, "
            f"got {kind.architectures}"
        )
    if kind.quantization_config is not None:
        method = kind.quantization_config.get("quant_method", "unknown")
        raise ConfigError(
            f"{path}: quantization_config must be absent, got quant_method {method!r}: "
            "only unquantized weights are supported"
        )
    _check_options(path, kind)
    file = _read(path, ConfigFile)
    _check_layer_types(path, file)
    return file


def _check_options(path: Path, kind: _Kind) -> None:
    architecture = (kind.architectures or [""])[0]
    wanted = _MODEL_TYPES[architecture]  # type: ignore[index]  # one of ARCHITECTURES, as checked
    if kind.model_type not in (None, wanted):
        raise ConfigError(f"{path}: model_type of {architecture} must be {wanted!r}, got {kind.model_type!r}")
    for name, value in _read(path, dict[str, object]).items():
        if name in OPTIONS_OF_OTHERS and value is not None and value not in OPTIONS_OF_OTHERS[name]:
            allowed = ", ".join(map(repr, OPTIONS_OF_OTHERS[name])) or "absent"
            raise ConfigError(f"{path}: {name} must be {allowed}, got {str(value)[:80]!r}")


def _check_layer_types(path: Path, file: ConfigFile) -> None:
    """Raise ConfigError for kinds of layers that are not supported. Only Qwen has windows by layer.

    transformers cannot compute a Mistral with kinds of layers.
    """
    if file.layer_types is None:
        return
    kinds: tuple[str, ...] = (_FULL, _SLIDING) if file.architecture.startswith("Qwen") else (_FULL,)
    if file.architecture == "MistralForCausalLM":
        kinds = ()
    for kind in file.layer_types:
        if kind not in kinds:
            raise ConfigError(f"{path}: layer_types must be {' or '.join(kinds) or 'absent'}, got {kind!r}")
    if len(file.layer_types) != file.num_hidden_layers:
        raise ConfigError(
            f"{path}: layer_types must name {file.num_hidden_layers} layers, got {len(file.layer_types)}"
        )


def read_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Read the end-of-sequence ids of `generation_config.json`; empty without the file or the key."""
    path = folder / "generation_config.json"
    return _as_tuple(_read(path, _GenerationFile).eos_token_id) if path.exists() else ()


def _as_tuple(token_ids: _TokenIds) -> tuple[int, ...]:
    """Return all ids. Some configs have -1, which is the id of no token."""
    ids = [token_ids] if isinstance(token_ids, int) else token_ids or ()
    return tuple(token_id for token_id in ids if token_id >= 0)


def _read(path: Path, file_type: type[_File]) -> _File:
    try:
        return msgspec.json.decode(path.read_bytes(), type=file_type)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except NOT_JSON as error:
        raise ConfigError(f"{path}: {error}") from error
