"""Granite, without experts: a Llama whose embeddings, scores, layers and logits are scaled."""

from dataclasses import replace
from typing import Annotated

import msgspec

from loong.model.config import ModelConfig
from loong.model.families.family import Family
from loong.model.families.llama import LlamaFile

_Positive = Annotated[float, msgspec.Meta(gt=0.0)]


class GraniteFile(LlamaFile, frozen=True, kw_only=True):
    """config.json of a Granite."""

    embedding_multiplier: _Positive = 1.0
    attention_multiplier: _Positive = 1.0
    residual_multiplier: _Positive = 1.0
    logits_scaling: _Positive = 1.0

    def model_config(self) -> ModelConfig:
        """See ConfigFile."""
        return replace(
            super().model_config(),
            embedding_scale=self.embedding_multiplier,
            score_scale=self.attention_multiplier,
            residual_scale=self.residual_multiplier,
            logit_scale=1 / self.logits_scaling,
        )


GRANITE = Family("GraniteForCausalLM", "granite", GraniteFile)
