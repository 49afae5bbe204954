"""The description of a family of models."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from loong.model.families.config_file import ConfigFile

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class Family:
    """One family: the names that files call it by, and the reader of its config.

    `layer_types` are the kinds of layers that its config.json may name. `gguf_architecture` is its name in
    GGUF files, None if they are not read. There, `has_interleaved_heads` says that rows of queries and keys
    alternate between the two halves of a rotation. `gguf_scales` are fields of Scales by their keys.
    `tensor_names` are our names for parts of the names in its checkpoints, where they differ.
    `gguf_neutral` are the values that change nothing of keys that have no effect in other families.
    """

    architecture: str  # in config.json, such as LlamaForCausalLM
    model_type: str  # by which transformers chooses the computation
    config_file: type[ConfigFile]
    layer_types: tuple[str, ...] = (FULL,)
    tensor_names: Mapping[str, str] = field(default_factory=dict)
    gguf_architecture: str | None = None
    has_interleaved_heads: bool = False
    gguf_scales: Mapping[str, str] = field(default_factory=dict)
    gguf_neutral: Mapping[str, tuple[bool, ...]] = field(default_factory=dict)
