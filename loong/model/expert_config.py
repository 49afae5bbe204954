"""The sizes and options of a mixture of experts."""

from dataclasses import dataclass
from typing import Final

from loong.core.errors import ConfigError

_LARGEST_NUM_EXPERTS: Final = 2**12
_LARGEST_SIZE: Final = 2**22


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertConfig:
    """The experts of each layer that has them, and their router. Raises ConfigError for impossible sizes."""

    num_experts: int
    num_chosen: int  # for each token
    intermediate_size: int  # of one expert
    is_normalized: bool = True  # the weights of the chosen ones sum to 1
    has_bias: bool = False  # of the router and of each expert
    is_stacked: bool = False  # in checkpoints, as gpt-oss has them; see `stacked_experts`
    dense_layers: frozenset[int] = frozenset()  # that have one MLP of the model's intermediate_size instead

    def __post_init__(self) -> None:
        for name, largest in (("num_experts", _LARGEST_NUM_EXPERTS), ("intermediate_size", _LARGEST_SIZE)):
            if not 1 <= (size := getattr(self, name)) <= largest:
                raise ConfigError(f"{name} of experts must be 1 to {largest:,}, got {size:,}")
        if not 1 <= self.num_chosen <= self.num_experts:
            raise ConfigError(
                f"a token's experts must be 1 to the {self.num_experts} that there are, got {self.num_chosen}"
            )
