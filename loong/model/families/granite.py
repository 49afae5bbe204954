"""Granite, without experts: a Llama whose embeddings, scores, layers and logits are scaled."""

from dataclasses import replace

from loong.model.config import ModelConfig, Scales
from loong.model.families.family import Family
from loong.model.families.llama import LlamaFile


class GraniteFile(LlamaFile, frozen=True, kw_only=True):
    """config.json of a Granite."""

    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0

    def model_config(self) -> ModelConfig:
        """See ConfigFile."""
        return replace(
            super().model_config(),
            scales=Scales(
                embedding=self.embedding_multiplier,
                scores=self.attention_multiplier,
                residual=self.residual_multiplier,
                logit_divisor=self.logits_scaling,
            ),
        )


GRANITE = Family(
    "GraniteForCausalLM",
    "granite",
    GraniteFile,
    gguf_architecture="granite",
    has_interleaved_heads=True,
    gguf_scales={
        "embedding_scale": "embedding",
        "attention.scale": "scores",
        "residual_scale": "residual",
        "logit_scale": "logit_divisor",
    },
    gguf_neutral={"rope.scaling.finetuned": (True,)},  # otherwise a Granite has no rotary embedding
)
