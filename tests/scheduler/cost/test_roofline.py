"""Laws of a roofline: known times of known models, and sane ratios."""

from dataclasses import astuple, replace

import pytest

from loong.core.cost.cost_model import prefill_time
from loong.core.cost.cuda_graph_limits import NO_GRAPHS
from loong.core.cost.work import step_work
from loong.core.errors import ConfigError
from loong.core.instance import ESPGroup
from loong.core.placement import KVSegment, Placement
from loong.core.plan import BatchPlan, Transfer
from loong.core.request import RequestView
from loong.hardware.devices import DEVICES
from loong.scheduler.common.striping import batch_of, decode_part, striped_part
from loong.scheduler.cost.cost_model import WorkCostModel
from loong.scheduler.cost.roofline import ModelShape, kv_capacity, roofline

LLAMA_8B = ModelShape(
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    num_layer_parameters=32 * 4096 * (80 * 128 + 3 * 14336),
    num_output_parameters=4096 * 128256,
)
H200 = DEVICES["h200"]


def decode_time(model: WorkCostModel, num_requests: int, num_cached: int) -> float:
    """Of a step on one instance."""
    placements = {
        f"r{i}": Placement((KVSegment(f"r{i}", range(num_cached), 0),)) for i in range(num_requests)
    }
    views = (RequestView(r, num_cached, 1, 10, 0.0, None, p) for r, p in placements.items())
    batch = batch_of(ESPGroup((0,)), [decode_part(view, 0) for view in views])
    return model.step_time(step_work(batch, placements, is_first=False))


def test_decode_of_a_small_batch_takes_as_long_as_reading_the_weights() -> None:
    weights = 8.03e9 * 2 / 3.85e12
    assert decode_time(roofline(LLAMA_8B, H200), 1, 100) == pytest.approx(weights, rel=0.25)


def test_decode_of_a_large_batch_reads_its_kv_too() -> None:
    model = roofline(LLAMA_8B, H200)
    more = decode_time(model, 64, 16000) - decode_time(model, 64, 100)
    assert more == pytest.approx(64 * 15900 * 131072 / 3.85e12, rel=0.01)


def test_prefill_is_bound_by_computing() -> None:
    flops = 2 * 7e9 * 8192 + 4 * 32 * 4096 * 8192**2 / 2
    assert prefill_time(roofline(LLAMA_8B, H200), 8192, 0, 1) == pytest.approx(flops / 630e12, rel=0.15)


@pytest.mark.parametrize("device", DEVICES)
def test_long_prompts_gain_from_more_instances_and_from_tensor_parallelism(device: str) -> None:
    one, two = (roofline(LLAMA_8B, DEVICES[device], tp_size) for tp_size in (1, 2))
    alone = prefill_time(one, 100_000, 0, 1)
    assert 2 <= alone / prefill_time(one, 100_000, 0, 4) <= 4
    assert 1.2 <= alone / prefill_time(two, 100_000, 0, 1) <= 2


def test_faster_devices_take_less_time() -> None:
    names = ("h200", "h100", "a100", "cpu")
    times = [prefill_time(roofline(LLAMA_8B, DEVICES[name]), 4096, 0, 2) for name in names]
    assert times == sorted(times)


def test_a_slower_link_costs_only_what_travels() -> None:
    fast, slow = (roofline(LLAMA_8B, DEVICES[name]) for name in ("a100", "a800"))
    assert decode_time(fast, 8, 1000) == decode_time(slow, 8, 1000)
    assert fast.migration_time(1000, 0, 1) < slow.migration_time(1000, 0, 1)


def test_a_ring_hides_from_a_length_that_the_model_knows() -> None:
    """Transfers grow with the stripe, attention with its square."""
    free = replace(
        H200, graph_limits=NO_GRAPHS, hop_delay=0.0, launch=0.0, ring_launch=0.0, hop_launch=0.0, block=0
    )
    model = roofline(LLAMA_8B, free)
    exposed = replace(model, overlap=0.0)
    group = ESPGroup((0, 1))

    def seconds(cost_model: WorkCostModel, num_tokens: int) -> float:
        view = RequestView("r", num_tokens, 0, 1, 0.0, None, Placement())
        batch: BatchPlan = batch_of(group, [striped_part(view, num_tokens, group, Transfer.KV)])
        return cost_model.step_time(step_work(batch, {"r": view.placement}))

    def is_hidden(num_tokens: int) -> bool:
        work = replace(model, coefficients=replace(model.coefficients, ring_key=0.0))
        return seconds(model, num_tokens) == pytest.approx(seconds(work, num_tokens), rel=1e-9)

    assert not is_hidden(2 * 100)
    assert is_hidden(2 * 1600)
    assert seconds(exposed, 3200) > seconds(model, 3200)


def test_no_coefficient_is_negative_on_any_device() -> None:
    for device in DEVICES.values():
        assert min(astuple(roofline(LLAMA_8B, device, 2).coefficients)) >= 0


def test_kv_fits_beside_the_weights() -> None:
    assert kv_capacity(LLAMA_8B, H200) == pytest.approx((0.9 * 143e9 - 2 * 9.1e9) / 131072, rel=0.02)
    assert kv_capacity(replace(LLAMA_8B, num_layer_parameters=10**12), H200) == 0


def test_kv_in_fp8_takes_about_half_the_memory_and_the_time_to_read() -> None:
    fp8 = replace(LLAMA_8B, has_fp8_kv=1)
    assert kv_capacity(fp8, H200) / kv_capacity(LLAMA_8B, H200) == pytest.approx(256 / 132, rel=0.01)
    wide, narrow = (roofline(shape, H200).coefficients for shape in (LLAMA_8B, fp8))
    assert narrow.decode_key / wide.decode_key == pytest.approx(132 / 256)
    assert narrow.pair == wide.pair


def test_layers_with_a_window_make_long_decodes_faster() -> None:
    windows = replace(LLAMA_8B, window=128, num_window_layers=24)
    short, long = (
        decode_time(roofline(windows, H200), 8, length) / decode_time(roofline(LLAMA_8B, H200), 8, length)
        for length in (64, 100_000)
    )
    assert short == pytest.approx(1.0)
    assert long < 0.5
    assert windows.read_kv_bytes(100) == 100 * windows.kv_bytes
    assert windows.read_kv_bytes(1e6) == pytest.approx(windows.kv_bytes * (8e6 + 24 * 128) / 32)


@pytest.mark.parametrize("tp_size", [3, 16])
def test_kv_heads_that_cannot_be_cut_are_refused_with_both_numbers(tp_size: int) -> None:
    for owed in (roofline, kv_capacity):
        with pytest.raises(ConfigError, match=f"--tensor-parallel-size of {tp_size} .* 8 KV heads"):
            owed(LLAMA_8B, H200, tp_size)
