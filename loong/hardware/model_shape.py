"""The sizes of a model that decide its time, from its config."""

from loong.model.config import DTYPE_BYTES, ModelConfig
from loong.model.quantization.config import Method
from loong.scheduler.cost.roofline import ModelShape


def shape_of(config: ModelConfig, *, keeps_fp8: bool = False) -> ModelShape:
    """Return the sizes of a model. Its layers are in FP8 if they are quantized so and a device `keeps_fp8`.

    A layer's parameters are those of four attention projections and three of its MLP, or of each of its
    experts.
    """
    num_heads = 2 * config.num_heads + 2 * config.num_kv_heads  # queries, outputs, keys and values
    in_attention = config.hidden_size * num_heads * config.head_dim
    num_sparse = sum(config.experts_of(index) is not None for index in range(config.num_layers))
    experts, in_mlp = config.experts, 3 * config.hidden_size * config.intermediate_size
    in_expert = 3 * config.hidden_size * experts.intermediate_size if experts else 0
    num_chosen, num_experts = (experts.num_chosen, experts.num_experts) if experts else (0, 0)
    in_mlps = (config.num_layers - num_sparse) * in_mlp + num_sparse * num_chosen * in_expert
    windows = [window for window in config.layer_windows if window is not None]
    is_fp8 = config.quantization is not None and config.quantization.method is Method.FP8
    return ModelShape(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_layer_parameters=config.num_layers * in_attention + in_mlps,
        num_output_parameters=config.hidden_size * config.vocab_size,
        element_bytes=DTYPE_BYTES[config.dtype],
        num_experts=num_experts,
        num_chosen_experts=num_chosen,
        has_fp8_layers=int(is_fp8 and keeps_fp8),
        has_fp8_kv=int(config.has_fp8_kv),
        num_idle_parameters=num_sparse * (num_experts - num_chosen) * in_expert,
        window=max(windows, default=0),
        num_window_layers=len(windows),
    )
