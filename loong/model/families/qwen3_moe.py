"""Qwen3 with experts."""

from dataclasses import replace

from loong.model.config import ModelConfig
from loong.model.expert_config import ExpertConfig
from loong.model.families.config_file import ConfigFile, Size
from loong.model.families.family import Family


class Qwen3MoeFile(ConfigFile, frozen=True, kw_only=True):
    """config.json of a Qwen3 with experts."""

    attention_bias: bool = False
    sliding_window: int | None = 4096
    use_sliding_window: bool = False
    num_experts: int | None = None
    num_local_experts: int | None = None  # the same, as transformers 5 writes it
    num_experts_per_tok: Size = 8
    moe_intermediate_size: Size = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: Size = 1
    mlp_only_layers: list[int] | None = None

    def model_config(self) -> ModelConfig:
        """See ConfigFile."""
        return replace(
            super().model_config(),
            has_qkv_bias=self.attention_bias,
            has_o_bias=self.attention_bias,
            has_qk_norm=True,
            sliding_window=self.sliding_window if self.use_sliding_window else None,
            experts=self._experts(),
        )

    def _experts(self) -> ExpertConfig | None:
        given = self.num_local_experts if self.num_experts is None else self.num_experts
        if (num_experts := 128 if given is None else given) <= 0:
            return None
        step, dense_layers = self.decoder_sparse_step, set(self.mlp_only_layers or ())
        dense_layers |= {index for index in range(self.num_hidden_layers) if (index + 1) % step}
        return ExpertConfig(
            num_experts=num_experts,
            num_chosen=self.num_experts_per_tok,
            intermediate_size=self.moe_intermediate_size,
            is_normalized=self.norm_topk_prob,
            dense_layers=frozenset(dense_layers),
        )


QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM", "qwen3_moe", Qwen3MoeFile, layer_types=(), gguf_architecture="qwen3moe"
)
