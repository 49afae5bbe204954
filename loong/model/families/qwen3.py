"""Qwen3, without experts: norms of each head of queries and keys."""

from dataclasses import replace

from loong.model.config import ModelConfig
from loong.model.families.family import FULL, SLIDING, Family
from loong.model.families.qwen2 import Qwen2File


class Qwen3File(Qwen2File, frozen=True, kw_only=True):
    """config.json of a Qwen3."""

    attention_bias: bool = False

    def model_config(self) -> ModelConfig:
        """See ConfigFile."""
        return replace(
            super().model_config(),
            head_dim=self.head_dim or 128,
            has_qkv_bias=self.attention_bias,
            has_o_bias=self.attention_bias,
            has_qk_norm=True,
        )


QWEN3 = Family("Qwen3ForCausalLM", "qwen3", Qwen3File, layer_types=(FULL, SLIDING), gguf_architecture="qwen3")
