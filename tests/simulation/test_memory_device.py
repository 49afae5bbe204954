"""Memory instances of another kind of device, and the mix that the planner chooses of both kinds."""

from dataclasses import replace

import pytest

from loong.core.cost.work import StepWork, WorkCount
from loong.core.instance import ESPGroup
from loong.core.placement import striped
from loong.hardware.device_mix import Demand, Offer, OfferedDevice, offers
from loong.hardware.devices import DEVICES
from loong.hardware.model_shape import shape_of
from loong.model.shapes import SHAPES
from loong.scheduler.config import PolicyConfig
from loong.scheduler.cost.cost_model import WorkCostModel
from loong.simulation.cluster import Hardware
from loong.simulation.config import SimulateConfig, SimulatedLoadConfig
from loong.simulation.points import asked_of, run_point
from loong.workloads.metrics.slo import parse_slo

LLAMA = shape_of(SHAPES["llama-2-7b"])
LONG = "fixed(6000,300)"


def step_of(num_requests: int, num_keys: int) -> StepWork:
    """Return decodes of instance 0 whose history is on memory instance 1."""
    count = WorkCount((0,), is_lease=True)
    for _ in range(num_requests):
        count.add_decode(0, striped("", range(num_keys), (1,)))
    return count.step(ESPGroup((0,)), is_first=False)


def model_with(memory_device: str | None) -> WorkCostModel:
    hardware = Hardware(LLAMA, "h100", 1, memory_instances=1, memory_device=memory_device)
    return hardware.cluster("lamina").cost_model


def test_memory_instances_of_another_kind_read_and_exchange_by_its_rates() -> None:
    own, other = model_with(None), model_with("rtx-4090")
    assert model_with("h100") == own
    reading = [m.step_time(step_of(4, 200_000)) - m.step_time(step_of(4, 100_000)) for m in (own, other)]
    h100, rtx = DEVICES["h100"], DEVICES["rtx-4090"]
    assert reading[1] / reading[0] == pytest.approx(h100.memory_bandwidth / rtx.memory_bandwidth)
    readers = other.memory
    assert readers is not None
    assert readers.coefficients is not None
    coefficients = replace(readers.coefficients, sent_query=own.coefficients.sent_query)
    faster_link = replace(other, memory=replace(readers, coefficients=coefficients))
    queries = 2 * LLAMA.num_layers * LLAMA.query_bytes * 500
    seconds = other.step_time(step_of(500, 100)) - faster_link.step_time(step_of(500, 100))
    assert seconds == pytest.approx(queries / rtx.link_bandwidth - queries / h100.link_bandwidth, rel=0.01)


def offered(name: str, price: float, *, computes: bool) -> OfferedDevice:
    """Return a device with the rates by which it is simulated."""
    rates = DEVICES[name]
    flops = rates.linear_flops if computes else 0.0
    link, delay = rates.link_bandwidth, rates.exchange_delay / 2
    return OfferedDevice(
        name, price, rates.memory_bytes, rates.memory_bandwidth, flops, link, delay, link, delay
    )


def simulated(offer: Offer) -> float:
    """Return the tokens of answers a second of a unit, for two batches that arrive at once."""
    policy = "lamina" if offer.mix.memory else "replicas"
    memory_device = offer.mix.memory.name if offer.mix.memory else None
    config = SimulateConfig(
        model="llama-2-7b",
        policies=(policy,),
        rules=(parse_slo("tight", workload=LONG),),
        rates=(),
        hardware=Hardware(
            LLAMA, "h100", 1, memory_instances=offer.mix.num_memory, memory_device=memory_device
        ),
        load=SimulatedLoadConfig(LONG, 0, num_requests=2 * offer.batch_size),
    )
    config = replace(config, policy=PolicyConfig(max_micro_batches=offer.mix.num_micro_batches))
    return run_point(config, asked_of(config, policy, config.rules[0], 1e6)).metrics.output_throughput


def test_the_unit_that_is_planned_gives_most_for_its_price_in_simulation() -> None:
    devices = [offered("h100", 36_500, computes=True), offered("rtx-4090", 1_600, computes=False)]
    found = [o for o in offers(LLAMA, Demand(6000, 300, 0.2), devices, 8) if o.mix.num_computing == 1]
    small = [o for o in found if o.mix.memory is None or o.mix.memory.name == "rtx-4090"]
    chosen, alone = small[0], next(o for o in small if o.mix.memory is None)
    per_price = {offer: simulated(offer) / offer.mix.price for offer in (chosen, alone)}
    assert max(per_price, key=lambda offer: per_price[offer]) is chosen
