"""Coefficients from a model's shape and a device's rates, where nothing was measured."""

from dataclasses import dataclass

from loong.core.errors import ConfigError
from loong.scheduler.cost_model import Coefficients, WorkCostModel


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model decides its time. Parameters are counted once a step, embeddings left out."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layer_parameters: int
    num_output_parameters: int
    element_bytes: int = 2

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.element_bytes


@dataclass(frozen=True, slots=True)
class Device:
    """Rates that a device sustains (not its peaks), in FLOP and bytes a second, and delays in seconds."""

    linear_flops: float
    attention_flops: float
    memory_bandwidth: float
    memory_bytes: float
    link_bandwidth: float  # to one other device, one way
    all_reduce_bandwidth: float  # bytes reduced a second, over a host's devices
    host_bandwidth: float
    all_reduce_delay: float
    exchange_delay: float  # queries out and partials back, a layer
    hop_delay: float  # of a ring, a layer
    step_delay: float  # between two steps
    message_delay: float
    overlap: float = 1.0


# H200: the rates measured at 2,048 to 8,192 rows (GEMM), at 128k tokens (attention), by puts into a
# peer's memory (link). The others in proportion to their published peaks; A800 is A100 with a slower link.
DEVICES = {
    "h200": Device(700e12, 560e12, 3.85e12, 143e9, 383e9, 200e9, 54e9, 13e-6, 8.5e-6, 11e-6, 4e-4, 5e-5),
    "h100": Device(680e12, 545e12, 2.7e12, 80e9, 383e9, 200e9, 54e9, 13e-6, 8.5e-6, 11e-6, 4e-4, 5e-5),
    "a100": Device(240e12, 180e12, 1.7e12, 80e9, 250e9, 130e9, 25e9, 15e-6, 12e-6, 15e-6, 4e-4, 5e-5),
    "a800": Device(240e12, 180e12, 1.7e12, 80e9, 170e9, 90e9, 25e9, 15e-6, 12e-6, 15e-6, 4e-4, 5e-5),
    "cpu": Device(15e9, 10e9, 5e9, 4e9, 1e9, 1e9, 4e9, 1e-4, 3e-4, 3e-4, 4e-3, 1e-3, overlap=0.0),
}


def roofline(shape: ModelShape, device: Device, tp_size: int = 1) -> WorkCostModel:
    """The cost model of `shape` on instances of `tp_size` devices."""
    if shape.num_heads % tp_size:
        raise ConfigError(f"{shape.num_heads} attention heads cannot be cut over {tp_size} devices")
    num_kv_heads = max(1, shape.num_kv_heads // tp_size)
    kv_bytes = shape.kv_bytes * num_kv_heads / shape.num_kv_heads  # a device
    query_bytes = shape.num_layers * shape.num_heads * shape.head_dim * shape.element_bytes / tp_size
    num_parameters = shape.num_layer_parameters + shape.num_output_parameters
    pair_flops = 4 * shape.num_layers * shape.num_heads * shape.head_dim
    reduced_bytes = 2 * shape.num_layers * shape.hidden_size * shape.element_bytes if tp_size > 1 else 0
    reduce_delay = 2 * shape.num_layers * device.all_reduce_delay if tp_size > 1 else 0.0
    return WorkCostModel(
        Coefficients(
            step=device.step_delay + reduce_delay,
            member=0.0,
            exchange=shape.num_layers * device.exchange_delay,
            ring=shape.num_layers * device.hop_delay,
            weights=num_parameters * shape.element_bytes / tp_size / device.memory_bandwidth,
            token=2 * shape.num_layer_parameters / tp_size / device.linear_flops
            + reduced_bytes / device.all_reduce_bandwidth,
            decode_key=kv_bytes / device.memory_bandwidth,
            key=kv_bytes / device.memory_bandwidth,
            pair=pair_flops / tp_size / device.attention_flops,
            ring_key=kv_bytes / device.link_bandwidth,
            sent_query=2 * query_bytes / device.link_bandwidth,
            kept_key=2 * kv_bytes / device.memory_bandwidth,
            message=device.message_delay,
            moved_key=kv_bytes / device.link_bandwidth,
            offloaded_key=kv_bytes / device.host_bandwidth,
        ),
        overlap=device.overlap,
    )


def kv_capacity(shape: ModelShape, device: Device, tp_size: int = 1, memory_utilization: float = 0.9) -> int:
    """Tokens of KV that an instance holds beside its weights (input embeddings as large as the output)."""
    num_parameters = shape.num_layer_parameters + 2 * shape.num_output_parameters
    free = tp_size * device.memory_bytes * memory_utilization - num_parameters * shape.element_bytes
    return max(0, int(free // shape.kv_bytes))
