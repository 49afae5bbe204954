"""Coefficients from a model's shape and a device's rates, where nothing was measured."""

from dataclasses import dataclass, replace
from math import prod

from loong.core.cost.cost_model import HostTimes
from loong.core.cost.cuda_graph_limits import NO_GRAPHS, RING_ROOM, CudaGraphLimits
from loong.core.errors import ConfigError
from loong.core.kv_layout import row_of_fp8_heads, row_of_heads
from loong.scheduler.cost.cost_model import Coefficients, ServiceLane, WindowReads, WorkCostModel
from loong.scheduler.cost.network import LinkRates, Links, Network

TYPICAL_BATCH = 16  # tokens of a step, by which the experts are estimated that it reads


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model that decide its time. Parameters count once a step, without embeddings.

    In a mixture of experts a token meets `num_layer_parameters`. `num_idle_parameters` are those of the
    experts that it does not choose.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layer_parameters: int
    num_output_parameters: int
    element_bytes: int = 2
    num_experts: int = 0
    num_chosen_experts: int = 0  # by each token
    num_idle_parameters: int = 0
    has_fp8_layers: int = 0  # 1 if parameters of layers take one byte
    has_fp8_kv: int = 0  # 1 if keys and values are in FP8
    window: int = 0  # positions that queries see in layers with a window
    num_window_layers: int = 0

    @property
    def layer_parameter_bytes(self) -> int:
        """Return the bytes of a parameter of layers; scales are not counted."""
        return 1 if self.has_fp8_layers else self.element_bytes

    def read_bytes(self, num_tokens: int) -> float:
        """Return the bytes of parameters that a step of `num_tokens` reads.

        Of experts, it reads those that some token chooses, each token by chance.
        """
        num_in_layers: float = self.num_layer_parameters
        if self.num_idle_parameters:
            chosen = self.num_chosen_experts / self.num_experts
            num_in_layers += (1 - (1 - chosen) ** (num_tokens - 1)) * self.num_idle_parameters
        return self.layer_parameter_bytes * num_in_layers + self.element_bytes * self.num_output_parameters

    @property
    def kv_row_bytes(self) -> int:
        """Return the bytes of one token's keys and values in a layer."""
        if self.has_fp8_kv:
            return prod(row_of_fp8_heads(self.num_kv_heads, self.head_dim))
        return prod(row_of_heads(self.num_kv_heads, self.head_dim)) * self.element_bytes

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of one token's keys and values."""
        return self.num_layers * self.kv_row_bytes

    @property
    def window_kv_bytes(self) -> int:
        """Return the bytes of one token's keys and values in the layers with a window."""
        return self.num_window_layers * self.kv_row_bytes

    def read_kv_bytes(self, length: float) -> float:
        """Return the bytes that a token reads of `length` tokens before it, in all layers."""
        num_whole = self.num_layers - self.num_window_layers
        return self.kv_row_bytes * (num_whole * length + self.num_window_layers * min(length, self.window))

    @property
    def query_bytes(self) -> int:
        """Return the bytes of one token's queries in a layer."""
        return self.num_heads * self.head_dim * self.element_bytes

    def check_cut(self, tp_size: int) -> None:
        """Raise `ConfigError` unless each of `tp_size` devices gets the same number of whole KV heads."""
        if self.num_kv_heads % tp_size:
            raise ConfigError(
                f"a --tensor-parallel-size of {tp_size} does not divide {self.num_kv_heads} KV heads"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRates:
    """Rates that a device sustains (not its peaks), in FLOP and bytes a second, and delays in seconds."""

    linear_flops: float
    attention_flops: float  # of whole prompts
    part_flops: float  # where keys are on several devices, and where a captured step attends history
    lone_part_flops: float  # the same if each head has keys of its own, which are more to read and to copy
    memory_bandwidth: float
    memory_bytes: float
    link_bandwidth: float  # to one other device, one way
    move_bandwidth: float  # of KV at rest, which is gathered from slots and stored into slots
    host_bandwidth: float
    network: LinkRates  # between hosts
    all_reduce_delay: float
    exchange_delay: float  # queries out and partials back, a layer
    hop_delay: float  # of a ring, a layer
    step_delay: float  # between two steps
    host: HostTimes
    message_delay: float
    batch_delay: float  # each batch, in addition to its steps
    beside_delay: float = 0.0  # added to a step with prompts and decodes
    beside_group_delay: float = 0.0  # added to such a step of several instances
    settle_delay: float = 0.0  # each instance of a group but one, where a lease agrees on going on
    request_delay: float = 0.0  # to send one to an instance
    attend_delay: float = 0.0  # of an attention call, a layer: 0 where one call serves a batch
    segment_delay: float = 0.0  # to find one segment of KV
    block: int = 0  # queries of a head that are attended at once
    graph_limits: CudaGraphLimits = NO_GRAPHS
    launch: float = 0.0  # each layer: to launch the kernels of a prompt
    mixed_launch: float = 0.0  # added for decodes in the same step
    reduce_launch: float = 0.0  # added for each sum over the devices of an instance
    exchange_launch: float = 0.0  # added for queries that travel
    ring_launch: float = 0.0  # added for KV that travels
    hop_launch: float = 0.0  # added for each of its hops
    beside_ring_launch: float = 0.0  # added for queries without KV that travels
    overlap: float = 1.0
    relay_delay: float = 0.0  # a layer that reads what several queries share in one pass
    lane_delay: float = 0.0  # a layer of what an instance serves while it runs a batch of its own

    @property
    def links(self) -> Links:
        """Return the links within a host and between hosts."""
        return Links(LinkRates(self.link_bandwidth, self.hop_delay), self.network)


def roofline(
    shape: ModelShape,
    device: DeviceRates,
    tp_size: int = 1,
    host_ids: tuple[int, ...] = (),
    num_tokens: int = TYPICAL_BATCH,
) -> WorkCostModel:
    """Return the cost model of `shape` on instances of `tp_size` devices, each on the host of `host_ids`.

    All steps read the experts that `num_tokens` choose. Raises `ConfigError` by `check_cut`.
    """
    shape.check_cut(tp_size)
    return WorkCostModel(
        _coefficients(shape, device, tp_size, num_tokens),
        overlap=device.overlap,
        graph_limits=cuda_graph_limits(shape, device.graph_limits),
        host=device.host,
        lane=ServiceLane(shape.num_layers * device.lane_delay),
        network=Network.of(host_ids, device.links, shape.num_layers),
        windows=window_reads(shape),
    )


def _coefficients(shape: ModelShape, device: DeviceRates, tp_size: int, num_tokens: int) -> Coefficients:
    kv_bytes = shape.kv_bytes / tp_size  # a device
    query_bytes = shape.num_layers * shape.query_bytes / tp_size
    pair_flops = 4 * shape.num_layers * shape.num_heads * shape.head_dim
    num_sums = 2 * shape.num_layers if tp_size > 1 else 0
    summed_bytes = num_sums * shape.hidden_size * shape.element_bytes * (tp_size - 1)  # sent to all others
    pair = pair_flops / tp_size / device.attention_flops
    is_shared = shape.num_heads > shape.num_kv_heads
    part_pair = pair_flops / tp_size / (device.part_flops if is_shared else device.lone_part_flops)
    return Coefficients(
        batch=device.batch_delay,
        sent_request=device.request_delay,
        step=device.step_delay + num_sums * device.all_reduce_delay,
        member=0.0,
        settle=device.settle_delay,
        exchange=shape.num_layers * device.exchange_delay,
        ring=shape.num_layers * device.hop_delay,
        segment=device.segment_delay,
        beside=device.beside_delay,
        beside_group=device.beside_group_delay,
        launch=shape.num_layers * device.launch + num_sums * device.reduce_launch,
        mixed=shape.num_layers * device.mixed_launch,
        exchange_launch=shape.num_layers * device.exchange_launch,
        ring_launch=shape.num_layers * device.ring_launch,
        hop_launch=shape.num_layers * device.hop_launch,
        beside_ring=shape.num_layers * device.beside_ring_launch,
        weights=shape.read_bytes(num_tokens) / tp_size / device.memory_bandwidth,
        token=2 * shape.num_layer_parameters / tp_size / device.linear_flops
        + summed_bytes / device.link_bandwidth,
        attend=shape.num_layers * device.attend_delay,
        decode_key=kv_bytes / device.memory_bandwidth,
        key=device.block / 2 * pair,  # the last block of queries that reads them is half empty on average
        pair=pair,
        part_pair=part_pair - pair,
        ring_key=kv_bytes / device.link_bandwidth,
        sent_query=2 * query_bytes / device.link_bandwidth,
        kept_key=2 * kv_bytes / device.memory_bandwidth,
        message=device.message_delay,
        moved_key=kv_bytes / device.move_bandwidth,
        offloaded_key=kv_bytes / device.host_bandwidth,
        relay=shape.num_layers * device.relay_delay,
        relayed_key=part_pair,
    )


def window_reads(shape: ModelShape) -> WindowReads:
    """Return the layers of a model that have a window."""
    return WindowReads(shape.num_window_layers / shape.num_layers, shape.window)


def cuda_graph_limits(shape: ModelShape, limits: CudaGraphLimits) -> CudaGraphLimits:
    """Return the limits of workers of `shape` on a device with these `limits`.

    The KV that an instance brings fits the memory of RING_ROOM times the queries of a step.
    """
    graph_limits = limits.of_heads(shape.num_heads, shape.num_kv_heads)
    room = RING_ROOM * graph_limits.most_rows * shape.query_bytes // shape.kv_row_bytes
    most_room = min(graph_limits.most_kv_room, room)
    most_rows = min(graph_limits.most_kv_rows, most_room)
    return replace(graph_limits, most_kv_rows=most_rows, most_kv_room=most_room)


def kv_capacity(
    shape: ModelShape,
    device: DeviceRates,
    tp_size: int = 1,
    memory_utilization: float = 0.9,
    *,
    has_weights: bool = True,
    window_tokens: int | None = None,
) -> int:
    """Return the tokens of KV that an instance holds next to its weights, if it has any.

    Layers with a window hold `window_tokens`, or (None) as many as others. Input embeddings count as large as
    the output. Raises `ConfigError` by `check_cut`.
    """
    shape.check_cut(tp_size)
    num_in_layers = shape.num_layer_parameters + shape.num_idle_parameters
    weights = num_in_layers * shape.layer_parameter_bytes
    weights += 2 * shape.num_output_parameters * shape.element_bytes
    free = tp_size * device.memory_bytes * memory_utilization - (weights if has_weights else 0)
    if window_tokens is None:
        return max(0, int(free // shape.kv_bytes))
    free -= window_tokens * shape.window_kv_bytes
    return max(0, int(free // (shape.kv_bytes - shape.window_kv_bytes)))
