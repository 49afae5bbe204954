"""The keys of a GGUF file that describe a model: those that are read, and those that may be ignored.

All others of the architecture must have a value that changes nothing, so that no option of a model is lost.
Source: the hyperparameters that llama.cpp reads.
"""

from typing import Final

from loong.core.errors import ConfigError
from loong.model.families.family import Family
from loong.model.gguf.metadata import Metadata, shown

READ: Final = frozenset(
    {
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "attention.value_length",
        "block_count",
        "context_length",
        "embedding_length",
        "expert_count",
        "expert_feed_forward_length",
        "expert_used_count",
        "feed_forward_length",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scale_linear",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.type",
    }
)
WITHOUT_EFFECT: Final = frozenset(
    {
        "pooling_type",  # of embeddings
        "rope.scaling.finetuned",  # the origin of a scaling
        "tensor_data_layout",  # as converters write it
        "vocab_size",  # as the embedding has it
    }
)
# The values with which an option changes nothing. Those of all others are 0, false, and empty ones.
NEUTRAL: Final[dict[str, tuple[bool | float | str, ...]]] = {
    "attention.causal": (True,),
    "attention.output_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "expert_gating_func": (0, 1),  # softmax
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0.0, 1.0),
    "hidden_activation": ("silu",),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_beta_fast": (32.0,),
    "rope.scaling.yarn_beta_slow": (1.0,),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
}
_OTHER_KINDS: Final = ("adapter.", "clip.", "diffusion.", "xielu.")  # of files, and options without a prefix
_QUANTIZATION: Final = "general.quantization_version"


def check_keys(metadata: Metadata, family: Family) -> None:
    """Raise ConfigError naming a key that would change what the model computes, and is not supported."""
    prefix = f"{metadata.architecture}."
    for key, value in metadata.values.items():
        name = key.removeprefix(prefix)
        is_ours = name != key and name not in READ and name not in family.gguf_scales
        if key.startswith(_OTHER_KINDS) or (is_ours and not _is_neutral(name, value, family)):
            raise ConfigError(f"{metadata.path}: {key} is {shown(value)}, which is not supported")
    if metadata.values.get(_QUANTIZATION, 2) != 2:
        raise metadata.refusal(_QUANTIZATION, "2")
    if (metadata.optional("split.count", int) or 1) > 1:
        raise ConfigError(
            f"{metadata.path} is one of {metadata.values['split.count']} files of a split model, which are "
            "not supported; llama.cpp's `llama-gguf-split --merge` makes one file of them"
        )


def _is_neutral(name: str, value: object, family: Family) -> bool:
    if name in family.gguf_neutral:
        return value in family.gguf_neutral[name]
    if name in WITHOUT_EFFECT:
        return True
    return value in NEUTRAL[name] if name in NEUTRAL else not value
