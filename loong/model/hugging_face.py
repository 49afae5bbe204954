"""A model's config from a Hugging Face folder, and checks of unsupported options."""

from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from loong.core.errors import ConfigError
from loong.foreign_json import NOT_JSON
from loong.model.config import ModelConfig
from loong.model.families.config_file import ConfigFile, TokenIds, as_tuple
from loong.model.families.family import Family
from loong.model.families.registry import FAMILIES
from loong.model.quantization.config import parse_quantization

# Options that change the computation of other models, with the values that change nothing, besides null.
OPTIONS_OF_OTHERS: Final[dict[str, tuple[object, ...]]] = {
    **dict.fromkeys(("alibi", "is_encoder_decoder", "parallel_attn", "rope_interleaved"), (False,)),
    **dict.fromkeys(("qk_layernorm", "qk_norm", "use_bidirectional_attention", "use_qk_norm"), (False,)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "logit_softcapping"), (0,)),
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts"), (0,)),
    **dict.fromkeys(("embedding_multiplier", "logit_scale", "logits_scaling", "residual_multiplier"), (1,)),
    **dict.fromkeys(("mup_width_scale", "scale_emb"), (1,)),
    **dict.fromkeys(("attention_chunk_size", "attention_multiplier", "clip_qkv", "dim_model_base"), ()),
    **dict.fromkeys(("no_rope_layer_interval", "query_pre_attn_scalar", "scale_depth"), ()),
    "hidden_act": ("silu", "swish"),
    "hidden_activation": ("silu", "swish"),
    "is_causal": (True,),
    "no_rope_layers": ([],),
}

_File = TypeVar("_File")


class _Kind(msgspec.Struct, frozen=True):
    """The fields that decide whether config.json can be read."""

    architectures: list[str] | None = None
    model_type: str | None = None
    quantization_config: dict[str, object] | None = None


class _GenerationFile(msgspec.Struct, frozen=True):
    eos_token_id: TokenIds = None


def load_config(folder: Path) -> ModelConfig:
    """Read `config.json` and, for its end-of-sequence ids, `generation_config.json` of a local folder.

    Raises ConfigError naming the key at fault, its value and what is supported.
    """
    path = folder / "config.json"
    kind = _read(path, _Kind)
    family = FAMILIES.get((kind.architectures or [""])[0])
    if family is None:
        raise ConfigError(
            f"{path}: architectures must start with one of {', '.join(FAMILIES)}, got {kind.architectures}"
        )
    given = kind.quantization_config
    quantization = None if given is None else parse_quantization(str(path), given)
    _check_options(path, kind, family)
    file = _read(path, family.config_file)
    _check_layer_types(path, file, family)
    config = file.model_config()
    eos_token_ids = _read_eos_token_ids(folder) or config.eos_token_ids
    return replace(config, eos_token_ids=eos_token_ids, quantization=quantization)


def _check_options(path: Path, kind: _Kind, family: Family) -> None:
    if kind.model_type not in (None, family.model_type):
        raise ConfigError(
            f"{path}: model_type of {family.architecture} must be {family.model_type!r}, "
            f"got {kind.model_type!r}"
        )
    for name, value in _read(path, dict[str, object]).items():
        if name in family.config_file.__struct_fields__ or name not in OPTIONS_OF_OTHERS or value is None:
            continue
        if value not in OPTIONS_OF_OTHERS[name]:
            allowed = ", ".join(map(repr, OPTIONS_OF_OTHERS[name])) or "absent"
            raise ConfigError(f"{path}: {name} must be {allowed}, got {str(value)[:80]!r}")


def _check_layer_types(path: Path, file: ConfigFile, family: Family) -> None:
    """Raise ConfigError for kinds of layers that are not supported."""
    if file.layer_types is None:
        return
    for kind in file.layer_types:
        if kind not in family.layer_types:
            allowed = " or ".join(family.layer_types) or "absent"
            raise ConfigError(f"{path}: layer_types must be {allowed}, got {kind!r}")
    if len(file.layer_types) != file.num_hidden_layers:
        raise ConfigError(
            f"{path}: layer_types must name {file.num_hidden_layers} layers, got {len(file.layer_types)}"
        )


def _read_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Read the end-of-sequence ids of `generation_config.json`; empty without the file or the key."""
    path = folder / "generation_config.json"
    return as_tuple(_read(path, _GenerationFile).eos_token_id) if path.exists() else ()


def _read(path: Path, file_type: type[_File]) -> _File:
    try:
        return msgspec.json.decode(path.read_bytes(), type=file_type)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except NOT_JSON as error:
        raise ConfigError(f"{path}: {error}") from error
