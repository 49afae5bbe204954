"""Mixtral: a Mistral with experts. Its GGUF files are Llama's."""

from dataclasses import replace

from loong.model.config import ModelConfig
from loong.model.expert_config import ExpertConfig
from loong.model.families.config_file import ConfigFile, Size
from loong.model.families.family import Family


class MixtralFile(ConfigFile, frozen=True, kw_only=True):
    """config.json of a Mixtral."""

    rms_norm_eps: float = 1e-5
    rope_theta: float | None = 1e6
    sliding_window: int | None = None
    num_experts_per_tok: Size = 2
    num_local_experts: Size = 8

    def model_config(self) -> ModelConfig:
        """See ConfigFile."""
        config = super().model_config()
        experts = ExpertConfig(
            num_experts=self.num_local_experts,
            num_chosen=self.num_experts_per_tok,
            intermediate_size=config.intermediate_size,
        )
        return replace(config, sliding_window=self.sliding_window, experts=experts)


MIXTRAL = Family(
    "MixtralForCausalLM",
    "mixtral",
    MixtralFile,
    layer_types=(),
    tensor_names={"block_sparse_moe": "mlp", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"},
)
