"""Qwen2 and Qwen2.5: biases of queries, keys and values, and windows of some layers."""

from dataclasses import replace

from loong.model.config import ModelConfig
from loong.model.families.config_file import ConfigFile
from loong.model.families.family import FULL, SLIDING, Family, full_layers


class Qwen2File(ConfigFile, frozen=True, kw_only=True):
    """config.json of a Qwen2."""

    sliding_window: int | None = 4096
    use_sliding_window: bool = False
    max_window_layers: int = 28

    def model_config(self) -> ModelConfig:
        """See ConfigFile."""
        config, num_layers = replace(super().model_config(), has_qkv_bias=True), self.num_hidden_layers
        full = frozenset(range(min(self.max_window_layers, num_layers)))
        if self.layer_types is not None:
            full = full_layers(self.layer_types, num_layers, 1)
        if not self.use_sliding_window or len(full) == num_layers:
            return config
        return replace(config, sliding_window=self.sliding_window, full_layers=full)


QWEN2 = Family("Qwen2ForCausalLM", "qwen2", Qwen2File, layer_types=(FULL, SLIDING), gguf_architecture="qwen2")
