"""Gemma 3's text models: windows in five of six layers, two rotary embeddings, and norms on both sides."""

from dataclasses import replace
from typing import Annotated

import msgspec

from loong.core.activation import Activation
from loong.core.errors import ConfigError
from loong.model.config import ModelConfig, Norms, Scales
from loong.model.families.config_file import ConfigFile, Size
from loong.model.families.family import FULL, SLIDING, Family, full_layers
from loong.model.rope_config import DefaultRope, RopeConfig, parse_rope

_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0
_PATTERN = 6  # layers, of which the last has no window
_LAYERS_OF_27B = 62


class Gemma3File(ConfigFile, frozen=True, kw_only=True):
    """config.json of a Gemma 3. Its `rope_parameters` may be those of each kind of layers."""

    head_dim: Size | None = 256
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    hidden_activation: str = "gelu_pytorch_tanh"
    query_pre_attn_scalar: Annotated[float, msgspec.Meta(gt=0)] = 256
    sliding_window: Size | None = 4096
    sliding_window_pattern: Size = _PATTERN
    rope_local_base_freq: Annotated[float, msgspec.Meta(gt=0)] = _LOCAL_THETA

    def model_config(self) -> ModelConfig:
        """See ConfigFile. Raises ConfigError for another activation."""
        if self.hidden_activation != "gelu_pytorch_tanh":
            raise ConfigError(
                f"hidden_activation must be 'gelu_pytorch_tanh', got {self.hidden_activation!r}"
            )
        config = super().model_config()
        return replace(
            config,
            has_qkv_bias=self.attention_bias,
            has_o_bias=self.attention_bias,
            has_qk_norm=True,
            activation=Activation.GELU_TANH,
            norms=Norms(offset=1.0, is_wide=True, has_outputs=True),
            scales=Scales(embedding=config.hidden_size**0.5, scores=self.query_pre_attn_scalar**-0.5),
            sliding_window=self.sliding_window,
            full_layers=full_layers(self.layer_types, config.num_layers, self.sliding_window_pattern),
            local_rope=self._local_rope(),
        )

    def _rope(self) -> RopeConfig:
        """Return that of layers without a window. In the old layout they alone are scaled."""
        kinds = self.rope_parameters or {}
        if isinstance(given := kinds.get(FULL), dict):
            return self._parsed(given)
        return self._parsed(self.rope_scaling or kinds, self.rope_theta or _GLOBAL_THETA)

    def _local_rope(self) -> RopeConfig:
        given = (self.rope_parameters or {}).get(SLIDING)
        return self._parsed(given if isinstance(given, dict) else {}, self.rope_local_base_freq)

    def _parsed(self, given: dict[str, object], theta: float | None = None) -> RopeConfig:
        return parse_rope(given, rope_theta=theta, max_position_embeddings=self.max_position_embeddings)


def _of_gguf(config: ModelConfig) -> ModelConfig:
    """Add what llama.cpp takes as known. Weights of norms have their offset in the file."""
    is_27b = config.num_layers == _LAYERS_OF_27B
    score_width = config.hidden_size // config.num_heads if is_27b else config.head_dim
    return replace(
        config,
        activation=Activation.GELU_TANH,
        norms=Norms(is_wide=True, has_outputs=True),
        scales=Scales(embedding=config.hidden_size**0.5, scores=score_width**-0.5),
        full_layers=full_layers(None, config.num_layers, _PATTERN),
        local_rope=DefaultRope(rope_theta=_LOCAL_THETA),
    )


GEMMA3 = Family(
    "Gemma3ForCausalLM",
    "gemma3_text",
    Gemma3File,
    layer_types=(FULL, SLIDING),
    gguf_architecture="gemma3",
    gguf_neutral={"attention.sliding_window_pattern": (_PATTERN,), "rope.freq_base_swa": (_LOCAL_THETA,)},
    gguf_names={
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    of_gguf=_of_gguf,
)
