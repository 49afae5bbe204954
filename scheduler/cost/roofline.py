"""Coefficients from a model's shape and a device's rates, where nothing was measured."""

from dataclasses import dataclass, replace
from math import ceil

from loong.core.cost.cuda_graph_limits import H200_GRAPH_LIMITS, NO_GRAPHS, CudaGraphLimits
from loong.core.errors import ConfigError
from loong.scheduler.cost.cost_model import WHOLE_INSTANCE, Coefficients, ServiceLane, WorkCostModel


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

    def check_cut(self, tp_size: int) -> None:
        """Raise `ConfigError` unless each of `tp_size` devices gets as many whole KV heads."""
        if self.num_kv_heads % tp_size:
            raise ConfigError(
                f"a --tensor-parallel-size of {tp_size} does not divide {self.num_kv_heads} KV heads"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRates:
    """Rates that a device sustains (not its peaks), in FLOP and bytes a second, and delays in seconds."""

    linear_flops: float
    attention_flops: float  # of whole prompts
    part_flops: float  # where the keys are of several devices, and where a captured step meets history
    lone_part_flops: float  # likewise if each head has keys of its own, which are more to read and to copy
    memory_bandwidth: float
    memory_bytes: float
    link_bandwidth: float  # to one other device, one way
    host_bandwidth: float
    all_reduce_delay: float
    exchange_delay: float  # queries out and partials back, a layer
    hop_delay: float  # of a ring, a layer
    step_delay: float  # between two steps
    message_delay: float
    batch_delay: float  # what a batch takes beside its steps
    beside_delay: float = 0.0  # what a step with prompts and decodes takes more
    settle_delay: float = 0.0  # where a lease settles whether it goes on, an instance but one
    request_delay: float = 0.0  # to send one to an instance
    attend_delay: float = 0.0  # of an attention call, a layer: 0 where one call serves a batch
    segment_delay: float = 0.0  # to find one segment of KV
    block: int = 0  # queries of a head that are attended at once
    graph_limits: CudaGraphLimits = NO_GRAPHS
    launch: float = 0.0  # a layer: to start the kernels of a prompt
    mixed_launch: float = 0.0  # and of decodes beside it
    reduce_launch: float = 0.0  # and of each sum over the devices of an instance
    exchange_launch: float = 0.0  # and of queries that travel
    ring_launch: float = 0.0  # and of KV that travels
    hop_launch: float = 0.0  # and of each of its hops
    beside_ring_launch: float = 0.0  # and of queries to which none travels
    overlap: float = 1.0
    lane: ServiceLane = WHOLE_INSTANCE  # that serves the batches of others


# Measured (docs/performance.md) by 105 steps of one: linear, with norms and activations, and attention. Where
# four served a mixed load: rings and chunks behind history (parts), 540 short prompts (batch, beside), and
# what groups took however little they computed (launches). By puts into a peer's memory: link.
_H200 = DeviceRates(
    linear_flops=645e12,
    attention_flops=617e12,
    part_flops=540e12,
    lone_part_flops=470e12,
    memory_bandwidth=3.85e12,
    memory_bytes=143e9,
    link_bandwidth=383e9,
    host_bandwidth=54e9,
    all_reduce_delay=13e-6,
    exchange_delay=38e-6,
    hop_delay=11e-6,
    step_delay=4e-4,
    message_delay=5e-5,
    batch_delay=2e-3,
    beside_delay=1.5e-3,
    request_delay=7e-5,
    block=128,
    graph_limits=H200_GRAPH_LIMITS,
    launch=3.7e-4,
    mixed_launch=3.7e-4,
    reduce_launch=3e-4,
    exchange_launch=3.7e-4,
    ring_launch=2.8e-4,
    hop_launch=2.8e-4,
    beside_ring_launch=3.7e-3,
)
# In proportion to published peaks.
_H100 = replace(
    _H200,
    linear_flops=627e12,
    attention_flops=599e12,
    part_flops=525e12,
    lone_part_flops=456e12,
    memory_bandwidth=2.7e12,
    memory_bytes=80e9,
)
_A100 = replace(
    _H200,
    linear_flops=240e12,
    attention_flops=190e12,
    part_flops=145e12,
    lone_part_flops=145e12,
    memory_bandwidth=1.7e12,
    memory_bytes=80e9,
    link_bandwidth=250e9,
    host_bandwidth=25e9,
    all_reduce_delay=15e-6,
    exchange_delay=54e-6,
    hop_delay=15e-6,
)
_A800 = replace(_A100, link_bandwidth=170e9)
# A core of a virtual AMD EPYC, by `loong profile` of the tiny built-in model.
_CPU = DeviceRates(
    linear_flops=24e9,
    attention_flops=26e9,
    part_flops=26e9,
    lone_part_flops=26e9,
    memory_bandwidth=10e9,
    memory_bytes=4e9,
    link_bandwidth=0.7e9,
    host_bandwidth=4e9,
    all_reduce_delay=2e-4,
    exchange_delay=5e-4,
    hop_delay=4e-4,
    step_delay=6e-4,
    message_delay=9e-4,
    batch_delay=5e-4,
    settle_delay=1.5e-4,
    request_delay=18e-6,
    attend_delay=95e-6,
    segment_delay=6e-6,
    overlap=0.0,
)
DEVICES = {"h200": _H200, "h100": _H100, "a100": _A100, "a800": _A800, "cpu": _CPU}


def roofline(shape: ModelShape, device: DeviceRates, tp_size: int = 1) -> WorkCostModel:
    """The cost model of `shape` on instances of `tp_size` devices. Raises `ConfigError` by `check_cut`."""
    shape.check_cut(tp_size)
    kv_bytes = shape.kv_bytes / tp_size  # a device
    query_bytes = shape.num_layers * shape.num_heads * shape.head_dim * shape.element_bytes / tp_size
    num_parameters = shape.num_layer_parameters + shape.num_output_parameters
    pair_flops = 4 * shape.num_layers * shape.num_heads * shape.head_dim
    num_sums = 2 * shape.num_layers if tp_size > 1 else 0
    summed_bytes = num_sums * shape.hidden_size * shape.element_bytes * (tp_size - 1)  # sent to all others
    pair = pair_flops / tp_size / device.attention_flops
    is_shared = shape.num_heads > shape.num_kv_heads
    part_pair = pair_flops / tp_size / (device.part_flops if is_shared else device.lone_part_flops)
    return WorkCostModel(
        Coefficients(
            batch=device.batch_delay,
            sent_request=device.request_delay,
            step=device.step_delay + num_sums * device.all_reduce_delay,
            member=0.0,
            settle=device.settle_delay,
            exchange=shape.num_layers * device.exchange_delay,
            ring=shape.num_layers * device.hop_delay,
            segment=device.segment_delay,
            beside=device.beside_delay,
            launch=shape.num_layers * device.launch + num_sums * device.reduce_launch,
            mixed=shape.num_layers * device.mixed_launch,
            exchange_launch=shape.num_layers * device.exchange_launch,
            ring_launch=shape.num_layers * device.ring_launch,
            hop_launch=shape.num_layers * device.hop_launch,
            beside_ring=shape.num_layers * device.beside_ring_launch,
            weights=num_parameters * shape.element_bytes / tp_size / device.memory_bandwidth,
            token=2 * shape.num_layer_parameters / tp_size / device.linear_flops
            + summed_bytes / device.link_bandwidth,
            attend=shape.num_layers * device.attend_delay,
            decode_key=kv_bytes / device.memory_bandwidth,
            key=device.block / 2 * pair,  # the last block of queries that meets them is half empty
            pair=pair,
            part_pair=part_pair - pair,
            ring_key=kv_bytes / device.link_bandwidth,
            sent_query=2 * query_bytes / device.link_bandwidth,
            kept_key=2 * kv_bytes / device.memory_bandwidth,
            message=device.message_delay,
            moved_key=kv_bytes / device.link_bandwidth,
            offloaded_key=kv_bytes / device.host_bandwidth,
        ),
        overlap=device.overlap,
        graph_limits=cuda_graph_limits(shape, device),
        lane=device.lane,
    )


def cuda_graph_limits(shape: ModelShape, device: DeviceRates) -> CudaGraphLimits:
    """What workers of `shape` capture on a device.

    Where KV travels it has the room of as many numbers of queries, or of twice as many where heads are alike.
    """
    graph_limits = device.graph_limits.of_heads(shape.num_heads, shape.num_kv_heads)
    num_kv_heads = 2 * shape.num_kv_heads
    num_heads = shape.num_heads * max(1, ceil(num_kv_heads / shape.num_heads))
    most_rows = graph_limits.most_rows * num_heads // num_kv_heads
    return replace(graph_limits, most_kv_rows=min(graph_limits.most_kv_rows, most_rows))


def kv_capacity(
    shape: ModelShape, device: DeviceRates, tp_size: int = 1, memory_utilization: float = 0.9
) -> int:
    """Tokens of KV that an instance holds beside its weights (input embeddings as large as the output).

    Raises `ConfigError` by `check_cut`.
    """
    shape.check_cut(tp_size)
    num_parameters = shape.num_layer_parameters + 2 * shape.num_output_parameters
    free = tp_size * device.memory_bytes * memory_utilization - num_parameters * shape.element_bytes
    return max(0, int(free // shape.kv_bytes))
