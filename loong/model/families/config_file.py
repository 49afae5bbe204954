"""The keys of config.json that all families have."""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from loong.model.config import ModelConfig
from loong.model.rope_config import RopeConfig, parse_rope

Size = Annotated[int, msgspec.Meta(gt=0)]
TokenIds = int | list[int] | None


class ConfigFile(msgspec.Struct, frozen=True, kw_only=True):
    """config.json of any family; defaults are those of transformers. A family adds its own keys."""

    architectures: list[str]
    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    max_position_embeddings: Size
    original_max_position_embeddings: Size | None = None
    rope_parameters: dict[str, object] | None = None
    rope_scaling: dict[str, object] | None = None
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    layer_types: list[str] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    bos_token_id: int | None = None
    eos_token_id: TokenIds = None

    def model_config(self) -> ModelConfig:
        """Return the config of the decoder. A family sets what it has besides."""
        return ModelConfig(
            architecture=self.architectures[0],
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_hidden_layers,
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads or self.num_attention_heads,
            head_dim=self.head_dim or self.hidden_size // self.num_attention_heads,
            max_position_embeddings=self.max_position_embeddings,
            rope=self._rope(),
            dtype=self.dtype or self.torch_dtype or "float32",
            rms_norm_eps=self.rms_norm_eps,
            tie_word_embeddings=self.tie_word_embeddings,
            bos_token_id=self.bos_token_id,
            eos_token_ids=as_tuple(self.eos_token_id),
        )

    def _rope(self) -> RopeConfig:
        """Return the rotary embedding, from the new layout or the old one.

        The old one has priority, as in transformers.
        """
        parameters = dict(self.rope_scaling or self.rope_parameters or {})
        if self.original_max_position_embeddings is not None:
            parameters["original_max_position_embeddings"] = self.original_max_position_embeddings
        if self.partial_rotary_factor is not None:
            parameters.setdefault("partial_rotary_factor", self.partial_rotary_factor)
        return parse_rope(
            parameters, rope_theta=self.rope_theta, max_position_embeddings=self.max_position_embeddings
        )


def as_tuple(token_ids: TokenIds) -> tuple[int, ...]:
    """Return all ids. Some configs have -1, which is the id of no token."""
    ids: Sequence[int] = [token_ids] if isinstance(token_ids, int) else token_ids or ()
    return tuple(token_id for token_id in ids if token_id >= 0)
