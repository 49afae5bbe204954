"""The description of a family of models."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from loong.model.config import ModelConfig
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
    `gguf_names` are our names for tensors of a layer there, where they differ. `of_gguf` adds to a config
    what all GGUF files of the family have and do not say.
    """

    architecture: str  # in config.json, such as LlamaForCausalLM
    model_type: str  # by which transformers chooses the computation
    config_file: type[ConfigFile]
    layer_types: tuple[str, ...] = (FULL,)
    tensor_names: Mapping[str, str] = field(default_factory=dict)
    gguf_architecture: str | None = None
    has_interleaved_heads: bool = False
    gguf_scales: Mapping[str, str] = field(default_factory=dict)
    gguf_neutral: Mapping[str, tuple[bool | float, ...]] = field(default_factory=dict)
    gguf_names: Mapping[str, str] = field(default_factory=dict)
    of_gguf: Callable[[ModelConfig], ModelConfig] | None = None


def full_layers(layer_types: Sequence[str] | None, num_layers: int, pattern: int) -> frozenset[int]:
    """Return the layers without a window: those that `layer_types` says, or else the last of each `pattern`
    layers.
    """
    if layer_types is not None:
        return frozenset(index for index, kind in enumerate(layer_types) if kind == FULL)
    return frozenset(range(pattern - 1, num_layers, pattern))
