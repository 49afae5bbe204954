"""Llama, and the models that have its architecture, such as SmolLM2 and LWM."""

from dataclasses import replace

from loong.model.config import ModelConfig
from loong.model.families.config_file import ConfigFile
from loong.model.families.family import Family


class LlamaFile(ConfigFile, frozen=True, kw_only=True):
    """config.json of a Llama."""

    attention_bias: bool = False
    mlp_bias: bool = False

    def model_config(self) -> ModelConfig:
        """See ConfigFile."""
        return replace(
            super().model_config(),
            has_qkv_bias=self.attention_bias,
            has_o_bias=self.attention_bias,
            has_mlp_bias=self.mlp_bias,
        )


LLAMA = Family("LlamaForCausalLM", "llama", LlamaFile, gguf_architecture="llama", has_interleaved_heads=True)
