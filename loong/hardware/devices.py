"""The rates of devices, for cost models where nothing was measured.

Rates are sustained, not peaks. `loong profile` writes the limits of CUDA graphs and the times of the host
from here into its file.
"""

from dataclasses import replace

from loong.core.cost.cost_model import HostTimes
from loong.core.cost.cuda_graph_limits import CudaGraphLimits
from loong.scheduler.cost.network import LinkRates
from loong.scheduler.cost.roofline import DeviceRates

_HOST = HostTimes(plan_request=20e-6, idle=0.02, lookahead_batch=4e-3, lookahead_request=130e-6)

# Measured (docs/performance.md) by 105 steps of one: linear, with norms and activations, and attention. Where
# four served a mixed load: rings and chunks behind history (parts), 540 prompts (`batch`, `beside`), and
# what groups took however little they computed (launches). By puts into a peer's memory: link.
# By moves of KV between two devices: move, message.
_H200 = DeviceRates(
    linear_flops=645e12,
    attention_flops=617e12,
    part_flops=540e12,
    lone_part_flops=470e12,
    memory_bandwidth=3.85e12,
    memory_bytes=143e9,
    link_bandwidth=383e9,
    move_bandwidth=200e9,
    host_bandwidth=54e9,
    network=LinkRates(bandwidth=45e9, latency=3e-5),  # 400 Gb/s a GPU
    all_reduce_delay=13e-6,
    exchange_delay=38e-6,
    hop_delay=11e-6,
    step_delay=4e-4,
    host=_HOST,
    message_delay=1e-3,
    batch_delay=2e-3,
    beside_delay=1.5e-3,
    beside_group_delay=4.7e-3,
    request_delay=7e-5,
    block=128,
    graph_limits=CudaGraphLimits(
        most_rows=2048,
        most_prompts=64,
        most_pairs=76 << 20,
        most_lone_pairs=28 << 20,
        most_kv_rows=4096,
        most_kv_room=16_384,
        most_gathered=40_960,
        least_copied=256,
        most_copied=1 << 17,
        keys_a_row=2,
        least_queries=256,
        row_pairs=1 << 14,
        lists_a_slot=2,
    ),
    launch=3.7e-4,
    mixed_launch=3.7e-4,
    reduce_launch=3e-4,
    exchange_launch=3.7e-4,
    ring_launch=2.8e-4,
    hop_launch=2.8e-4,
    beside_ring_launch=3.7e-3,
    relay_delay=2.3e-5,  # measured: five more kernels of a captured step
    lane_delay=9.7e-5,  # measured on two H100s, the same for 1k to 64k of KV and for 1 to 64 requests
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
    move_bandwidth=130e9,
    host_bandwidth=25e9,
    network=LinkRates(bandwidth=22e9, latency=3.5e-5),  # 200 Gb/s a GPU
    all_reduce_delay=15e-6,
    exchange_delay=54e-6,
    hop_delay=15e-6,
)
_A800 = replace(_A100, link_bandwidth=170e9, move_bandwidth=89e9)


def like_h200(
    *,
    flops: float,
    memory_bandwidth: float,
    memory_bytes: float,
    link_bandwidth: float,
    host_bandwidth: float,
) -> DeviceRates:
    """Return the rates of a GPU that sustains `flops` in large products of two-byte floats.

    Attention, captured steps and delays are in proportion to those of the H200.
    """
    share = flops / _H200.linear_flops
    return replace(
        _H200,
        linear_flops=flops,
        attention_flops=share * _H200.attention_flops,
        part_flops=share * _H200.part_flops,
        lone_part_flops=share * _H200.lone_part_flops,
        memory_bandwidth=memory_bandwidth,
        memory_bytes=memory_bytes,
        link_bandwidth=link_bandwidth,
        move_bandwidth=link_bandwidth / _H200.link_bandwidth * _H200.move_bandwidth,
        host_bandwidth=host_bandwidth,
    )


def _by_data_sheet(flops: float, memory_bandwidth: float, memory_bytes: float, link: float) -> DeviceRates:
    """Return the rates of a GPU with these published peaks. Nothing of it was measured.

    It sustains the shares of its peaks that the H200 does.
    """
    return like_h200(
        flops=0.65 * flops,
        memory_bandwidth=0.8 * memory_bandwidth,
        memory_bytes=memory_bytes,
        link_bandwidth=0.85 * link,
        host_bandwidth=_A100.host_bandwidth if link < _A100.link_bandwidth else _H200.host_bandwidth,
    )


# Peaks of dense products of bfloat16, of memory, and one way of NVLink, or of PCIe where there is none.
_B200 = _by_data_sheet(2250e12, 8e12, 180e9, 900e9)
_L40S = _by_data_sheet(362e12, 0.864e12, 48e9, 32e9)
_RTX_4090 = _by_data_sheet(165e12, 1.008e12, 24e9, 32e9)
_A10 = _by_data_sheet(125e12, 0.6e12, 24e9, 32e9)
# A core of a virtual AMD EPYC, by `loong profile` of the tiny built-in model.
_CPU = DeviceRates(
    linear_flops=24e9,
    attention_flops=26e9,
    part_flops=26e9,
    lone_part_flops=26e9,
    memory_bandwidth=10e9,
    memory_bytes=4e9,
    link_bandwidth=0.7e9,
    move_bandwidth=0.7e9,
    host_bandwidth=4e9,
    network=LinkRates(bandwidth=0.7e9, latency=4.5e-4),
    all_reduce_delay=2e-4,
    exchange_delay=5e-4,
    hop_delay=4e-4,
    step_delay=6e-4,
    host=_HOST,
    message_delay=9e-4,
    batch_delay=5e-4,
    settle_delay=1.5e-4,
    request_delay=18e-6,
    attend_delay=95e-6,
    segment_delay=6e-6,
    relay_delay=2e-4,
    overlap=0.0,
)
NOT_MEASURED = {"b200": _B200, "l40s": _L40S, "rtx-4090": _RTX_4090, "a10": _A10}
# A GPU that is none of these is measured when a server starts, and added under its name.
DEVICES = {"h200": _H200, "h100": _H100, "a100": _A100, "a800": _A800, **NOT_MEASURED, "cpu": _CPU}
_WITH_FP8 = ("h200", "h100", "b200", "l40s", "rtx-4090")


def keeps_fp8(device: str) -> bool:
    """Return whether plans count weights in FP8 by one byte. Others are counted as dequantized at load."""
    return device in _WITH_FP8
