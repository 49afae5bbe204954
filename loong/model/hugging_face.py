"""The config files of a Hugging Face folder, and checks of unsupported options."""

from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec

from loong.core.errors import ConfigError
from loong.foreign_json import NOT_JSON
from loong.model.rope_config import RopeConfig, parse_rope

Architecture = Literal["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
ARCHITECTURES: tuple[Architecture, ...] = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)

_Size = Annotated[int, msgspec.Meta(gt=0)]
_TokenIds = int | list[int] | None
_File = TypeVar("_File", bound=msgspec.Struct)


class _Kind(msgspec.Struct, frozen=True):
    """The fields that decide whether config.json can be read."""

    architectures: list[str] | None = None
    quantization_config: dict[str, object] | None = None
    hidden_act: str = "silu"


class ConfigFile(msgspec.Struct, frozen=True, kw_only=True):
    """config.json of any of ARCHITECTURES; defaults are those of transformers."""

    architectures: list[Architecture]
    vocab_size: _Size
    hidden_size: _Size
    intermediate_size: _Size
    num_hidden_layers: _Size
    num_attention_heads: _Size
    num_key_value_heads: _Size | None = None
    head_dim: _Size | None = None
    max_position_embeddings: _Size
    original_max_position_embeddings: _Size | None = None
    rope_parameters: dict[str, object] | None = None
    rope_scaling: dict[str, object] | None = None
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: _Size | None = 4096
    use_sliding_window: bool = False
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    bos_token_id: int | None = None
    eos_token_id: _TokenIds = None

    @property
    def architecture(self) -> Architecture:
        """The first, and in practice only, of `architectures`."""
        return self.architectures[0]

    @property
    def rope(self) -> RopeConfig:
        """The rotary embedding, from the new layout or the old one.

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

    @property
    def layered_sliding_window(self) -> int | None:
        """Qwen's sliding window, which it enables by layer; None if no layer has it."""
        if self.layer_types is not None:
            is_used = "sliding_attention" in self.layer_types
        else:
            is_used = self.max_window_layers < self.num_hidden_layers
        return self.sliding_window if self.use_sliding_window and is_used else None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The end-of-sequence ids. Those of generation_config.json have priority."""
        return _as_tuple(self.eos_token_id)


class _GenerationFile(msgspec.Struct, frozen=True):
    eos_token_id: _TokenIds = None


def read_config_file(folder: Path) -> ConfigFile:
    """Read `config.json`. Raises ConfigError naming the key, its value and the supported values."""
    path = folder / "config.json"
    kind = _read(path, _Kind)
    if not kind.architectures or kind.architectures[0] not in ARCHITECTURES:
        raise ConfigError(
            f"{path}: architectures must start with one of {', '.join(ARCHITECTURES)}, "
            f"got {kind.architectures}"
        )
    if kind.quantization_config is not None:
        method = kind.quantization_config.get("quant_method", "unknown")
        raise ConfigError(
            f"{path}: quantization_config must be absent, got quant_method {method!r}: "
            "only unquantized weights are supported"
        )
    if kind.hidden_act != "silu":
        raise ConfigError(f"{path}: hidden_act must be 'silu', got {kind.hidden_act!r}")
    return _read(path, ConfigFile)


def read_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Read the end-of-sequence ids of `generation_config.json`; empty without the file or the key."""
    path = folder / "generation_config.json"
    return _as_tuple(_read(path, _GenerationFile).eos_token_id) if path.exists() else ()


def _as_tuple(token_ids: _TokenIds) -> tuple[int, ...]:
    """Return all ids. Some configs have -1, which is the id of no token."""
    ids = [token_ids] if isinstance(token_ids, int) else token_ids or ()
    return tuple(token_id for token_id in ids if token_id >= 0)


def _read(path: Path, file_type: type[_File]) -> _File:
    try:
        return msgspec.json.decode(path.read_bytes(), type=file_type)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except NOT_JSON as error:
        raise ConfigError(f"{path}: {error}") from error
