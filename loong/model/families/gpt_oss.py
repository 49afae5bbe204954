"""gpt-oss: windows in every other layer, attention sinks, and experts with biases, stored in MXFP4."""

from dataclasses import replace

import msgspec

from loong.core.activation import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation
from loong.core.errors import ConfigError
from loong.model.config import ModelConfig, Norms
from loong.model.expert_config import ExpertConfig
from loong.model.families.config_file import ConfigFile, Size
from loong.model.families.family import FULL, SLIDING, Family, full_layers
from loong.model.rope_config import RopeConfig, YarnRope

_BETA_FAST, _BETA_SLOW = 32.0, 1.0
_YARN: dict[str, object] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": _BETA_FAST,
    "beta_slow": _BETA_SLOW,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_PATTERN = 2  # layers, of which the last has no window


class GptOssFile(ConfigFile, frozen=True, kw_only=True):
    """config.json of a gpt-oss."""

    rms_norm_eps: float = 1e-5
    head_dim: Size | None = 64
    rope_theta: float | None = 150_000.0
    attention_bias: bool = True
    sliding_window: Size | None = 128
    num_local_experts: Size | None = None
    num_experts: Size | None = None  # the same
    num_experts_per_tok: Size = 4
    swiglu_alpha: float = SWIGLU_ALPHA
    swiglu_limit: float = SWIGLU_LIMIT

    def model_config(self) -> ModelConfig:
        """See ConfigFile. Raises ConfigError for another activation."""
        for name, usual in (("swiglu_alpha", SWIGLU_ALPHA), ("swiglu_limit", SWIGLU_LIMIT)):
            if (value := getattr(self, name)) != usual:
                raise ConfigError(f"{name} must be {usual}, got {value}")
        config = super().model_config()
        experts = ExpertConfig(
            num_experts=self.num_local_experts or self.num_experts or 128,
            num_chosen=self.num_experts_per_tok,
            intermediate_size=config.intermediate_size,
            has_bias=True,
            is_stacked=True,
        )
        return replace(
            config,
            has_qkv_bias=self.attention_bias,
            has_o_bias=self.attention_bias,
            has_sinks=True,
            activation=Activation.CLAMPED_SWIGLU,
            norms=Norms(is_wide=True),
            sliding_window=self.sliding_window,
            full_layers=full_layers(self.layer_types, config.num_layers, _PATTERN),
            experts=experts,
        )

    def _rope(self) -> RopeConfig:
        """Return the rotary embedding, which is scaled if the file does not say how."""
        if self.rope_parameters is None and self.rope_scaling is None:
            return msgspec.structs.replace(self, rope_parameters=_YARN)._rope()
        return super()._rope()


def _of_gguf(config: ModelConfig) -> ModelConfig:
    """Add what llama.cpp takes as known. The ramp of yarn is the model's own, which llama.cpp truncates."""
    rope = config.rope
    if isinstance(rope, YarnRope):
        rope = msgspec.structs.replace(rope, beta_fast=_BETA_FAST, beta_slow=_BETA_SLOW, truncate=False)
    return replace(
        config,
        rope=rope,
        has_sinks=True,
        activation=Activation.CLAMPED_SWIGLU,
        norms=Norms(is_wide=True),
        full_layers=full_layers(None, config.num_layers, _PATTERN),
        experts=None if config.experts is None else replace(config.experts, has_bias=True, is_stacked=True),
    )


GPT_OSS = Family(
    "GptOssForCausalLM",
    "gpt_oss",
    GptOssFile,
    layer_types=(FULL, SLIDING),
    tensor_names={"router": "gate"},
    gguf_architecture="gpt-oss",
    gguf_neutral={"attention.sliding_window_pattern": (_PATTERN,)},
    gguf_names={"post_attention_norm": "post_attention_layernorm", "attn_sinks": "self_attn.sinks"},
    of_gguf=_of_gguf,
)
