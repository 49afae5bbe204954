"""The sizes of a model that decide its time, from its config."""

from loong.model.config import DTYPE_BYTES, ModelConfig
from loong.scheduler.cost.roofline import ModelShape


def shape_of(config: ModelConfig) -> ModelShape:
    """Return the sizes of a model.

    A layer's parameters are those of four attention projections and three of its MLP.
    """
    num_heads = 2 * config.num_heads + 2 * config.num_kv_heads  # queries, outputs, keys and values
    in_layer = config.hidden_size * (num_heads * config.head_dim + 3 * config.intermediate_size)
    return ModelShape(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_layer_parameters=config.num_layers * in_layer,
        num_output_parameters=config.hidden_size * config.vocab_size,
        element_bytes=DTYPE_BYTES[config.dtype],
    )
