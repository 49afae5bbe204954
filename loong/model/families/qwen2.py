"""Qwen2 and Qwen2.5: biases of queries, keys and values, and windows of some layers."""

from dataclasses import replace

from loong.model.config import ModelConfig
from loong.model.families.config_file import ConfigFile
from loong.model.families.family import FULL, SLIDING, Family


class Qwen2File(ConfigFile, frozen=True, kw_only=True):
    """config.json of a Qwen2."""

    sliding_window: int | None = 4096
    use_sliding_window: bool = False
    max_window_layers: int = 28

    def model_config(self) -> ModelConfig:
        """See ConfigFile."""
        config = super().model_config()
        return replace(config, has_qkv_bias=True, sliding_window=self._sliding_window())

    def _sliding_window(self) -> int | None:
        """Return the window, or None if no layer has it."""
        if self.layer_types is not None:
            is_used = SLIDING in self.layer_types
        else:
            is_used = self.max_window_layers < self.num_hidden_layers
        return self.sliding_window if self.use_sliding_window and is_used else None


QWEN2 = Family("Qwen2ForCausalLM", "qwen2", Qwen2File, layer_types=(FULL, SLIDING), gguf_architecture="qwen2")
