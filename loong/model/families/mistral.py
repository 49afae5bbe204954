"""Mistral: a Llama with a window. Its GGUF files are Llama's."""

from dataclasses import replace

from loong.model.config import ModelConfig
from loong.model.families.config_file import ConfigFile
from loong.model.families.family import Family


class MistralFile(ConfigFile, frozen=True, kw_only=True):
    """config.json of a Mistral."""

    sliding_window: int | None = 4096

    def model_config(self) -> ModelConfig:
        """See ConfigFile."""
        return replace(super().model_config(), sliding_window=self.sliding_window)


# transformers cannot compute a Mistral with kinds of layers.
MISTRAL = Family("MistralForCausalLM", "mistral", MistralFile, layer_types=())
