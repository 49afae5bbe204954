"""The config of a model: its sizes and options, whatever file they come from."""

from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Final

from loong.core.activation import Activation
from loong.core.errors import ConfigError
from loong.core.kv_layout import KVLayout, row_of_fp8_heads, row_of_heads
from loong.model.expert_config import ExpertConfig
from loong.model.quantization.config import Quantization
from loong.model.rope_config import DynamicRope, LinearRope, RopeConfig, YarnRope

if TYPE_CHECKING:
    import torch

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# Far beyond any model. What is computed from sizes, such as the names of all tensors, stays small.
LARGEST_SIZES: Final = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_layers": 2**12,
    "num_heads": 2**16,
    "num_kv_heads": 2**16,
    "head_dim": 2**12,
    "max_position_embeddings": 2**32,
}
_LARGEST_NUM_EXPERT_MLPS: Final = 2**16  # of all layers
LEAST_SCALE, LARGEST_SCALE = 1e-9, 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """The factors that some models have. Raises ConfigError if one is out of all proportion."""

    embedding: float = 1.0
    scores: float | None = None  # of products of queries and keys; None: 1 / sqrt(head_dim)
    residual: float = 1.0  # of what attention and MLP add to hidden states
    logit_divisor: float = 1.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            scale = getattr(self, name)
            if scale is not None and not LEAST_SCALE <= scale <= LARGEST_SCALE:
                raise ConfigError(
                    f"scales.{name} must be {LEAST_SCALE:g} to {LARGEST_SCALE:g}, got {scale:g}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Norms:
    """The RMS norms of a model."""

    offset: float = 0.0  # added to all weights
    is_wide: bool = False  # weights are float32, by which float32 is multiplied
    has_outputs: bool = False  # of what attention and MLP add to hidden states, too


NO_SCALES: Final = Scales()
USUAL_NORMS: Final = Norms()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The sizes and options of one decoder. Raises ConfigError if they do not fit together."""

    architecture: str  # Hugging Face's name of the family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rope: RopeConfig
    dtype: str  # a key of DTYPE_BYTES
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    has_sinks: bool = False  # a logit of each head, which is in each softmax
    norms: Norms = USUAL_NORMS
    activation: Activation = Activation.SILU
    scales: Scales = NO_SCALES
    experts: ExpertConfig | None = None
    quantization: Quantization | None = None  # of the weights of layers
    sliding_window: int | None = None  # of all layers but `full_layers`
    has_fp8_kv: bool = False
    full_layers: frozenset[int] = frozenset()
    local_rope: RopeConfig | None = None  # of layers with a window, if it is another
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, largest in LARGEST_SIZES.items():
            if not 1 <= (size := getattr(self, name)) <= largest:
                raise ConfigError(f"{name} must be 1 to {largest:,}, got {size:,}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ConfigError(f"sliding_window must be at least 1, got {self.sliding_window}")
        if not (isfinite(self.rms_norm_eps) and self.rms_norm_eps >= 0):
            raise ConfigError(f"rms_norm_eps must be at least 0, got {self.rms_norm_eps}")
        if self.num_heads % self.num_kv_heads != 0:
            raise ConfigError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.head_dim % 2 != 0:
            raise ConfigError(f"head_dim must be even for rotary embedding, got {self.head_dim}")
        if self.head_dim == 2 and isinstance(self.rope, DynamicRope):
            raise ConfigError("head_dim must be above 2 for dynamic rope scaling, got 2")
        num_mlps = self.num_layers * (self.experts.num_experts if self.experts else 0)
        if num_mlps > _LARGEST_NUM_EXPERT_MLPS:
            raise ConfigError(
                f"experts of all layers must be at most {_LARGEST_NUM_EXPERT_MLPS:,}, got {num_mlps:,}"
            )
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {self.dtype!r}")

    @property
    def torch_dtype(self) -> "torch.dtype":
        """The dtype of weights and activations, and of KV unless that is in FP8."""
        import torch  # not at the top: processes that only read a config do not need it

        return {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[self.dtype]

    def kv_layout(self, tp_size: int = 1) -> KVLayout:
        """Return the layout of KV on each of `tp_size` ranks. Raises ConfigError if they cannot share it."""
        if self.num_kv_heads % tp_size:
            raise ConfigError(
                f"tensor parallel size must divide num_kv_heads={self.num_kv_heads}, got {tp_size}"
            )
        heads = self.num_kv_heads // tp_size, self.head_dim
        if self.has_fp8_kv:
            return KVLayout(self.num_layers, row_of_fp8_heads(*heads), "uint8", self.layer_windows)
        return KVLayout(self.num_layers, row_of_heads(*heads), self.dtype, self.layer_windows)

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The window of each layer; see `KVLayout`."""
        if self.sliding_window is None:
            return ()
        layers = range(self.num_layers)
        return tuple(None if layer in self.full_layers else self.sliding_window for layer in layers)

    def mailbox_row_bytes(self, tp_size: int) -> int:
        """Return the bytes of a token of a rank in a mailbox: queries, attention, their lse and flags."""
        num_heads = -(-self.num_heads // tp_size)
        return num_heads * (2 * self.head_dim * DTYPE_BYTES[self.dtype] + 4) + 64

    def experts_of(self, layer_index: int) -> ExpertConfig | None:
        """Return the experts of a layer, or None if it has one MLP."""
        is_dense = self.experts is None or layer_index in self.experts.dense_layers
        return None if is_dense else self.experts

    @property
    def has_shareable_kv(self) -> bool:
        """Return whether KV of a token depends on the tokens up to it alone, whatever follows."""
        return not isinstance(self.rope, DynamicRope)

    @property
    def max_length(self) -> int:
        """The most tokens of a sequence that the model supports."""
        match self.rope:
            case LinearRope(factor=factor) | DynamicRope(factor=factor):
                return int(self.max_position_embeddings * factor)
            case YarnRope(factor=factor, original_max_position_embeddings=original):
                return max(self.max_position_embeddings, int(original * factor))
            case _:
                return self.max_position_embeddings
