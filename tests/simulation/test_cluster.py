from dataclasses import asdict, replace

import pytest

from loong.core.cost.cuda_graph_limits import NO_GRAPHS
from loong.core.errors import ConfigError
from loong.core.instance import Service
from loong.hardware.cost_model_file import FORMAT, CostModelFile
from loong.hardware.devices import DEVICES
from loong.hardware.memory import MAX_AUTO_TOKENS, weight_bytes
from loong.hardware.model_shape import shape_of
from loong.launcher.cluster.config import ClusterConfig
from loong.model.quantization.config import AT_LOAD
from loong.model.shapes import SHAPES
from loong.model.tiny import CONFIG
from loong.scheduler.cost.cost_model import DEFAULT_HOST, Coefficients, ServiceLane
from loong.scheduler.cost.roofline import kv_capacity
from loong.simulation.cluster import Hardware

LLAMA = shape_of(SHAPES["llama-3.1-8b"])


def test_a_shape_counts_the_parameters_of_the_model() -> None:
    num_parameters = LLAMA.num_layer_parameters + 2 * LLAMA.num_output_parameters
    assert num_parameters == pytest.approx(8.03e9, rel=1e-3)
    assert LLAMA.kv_bytes == SHAPES["llama-3.1-8b"].kv_layout().bytes_per_token


def test_a_mixture_of_experts_computes_some_of_its_parameters_and_stores_all() -> None:
    shape = shape_of(SHAPES["qwen3-30b-a3b"])
    active = shape.num_layer_parameters + 2 * shape.num_output_parameters
    assert active == pytest.approx(3.3e9, rel=2e-2)
    assert active + shape.num_idle_parameters == pytest.approx(30.5e9, rel=1e-2)
    assert weight_bytes(SHAPES["qwen3-30b-a3b"]) == pytest.approx(61.1e9, rel=1e-2)
    one, some, many = (shape.read_bytes(num_tokens) for num_tokens in (1, 16, 10_000))
    assert one == 2 * (shape.num_layer_parameters + shape.num_output_parameters)
    assert 2 * active < some < many == pytest.approx(one + 2 * shape.num_idle_parameters)
    quantized = replace(SHAPES["qwen3-30b-a3b"], quantization=AT_LOAD)
    assert weight_bytes(quantized, keeps_fp8=True) == pytest.approx(30.5e9 + 2 * 0.31e9, rel=1e-2)
    assert shape_of(quantized, keeps_fp8=True).read_bytes(16) == pytest.approx(some / 2, rel=0.05)
    assert shape_of(quantized) == shape
    assert kv_capacity(shape, DEVICES["h100"]) * shape.kv_bytes == pytest.approx(
        0.9 * 80e9 - 61.1e9, rel=0.02
    )


def test_a_policy_of_one_instance_gets_all_devices_in_one() -> None:
    hardware = Hardware(LLAMA, "h200", num_instances=4, tp_size=2)
    [instance] = hardware.cluster("tp").instances
    assert instance.tp_size == 8
    assert len(hardware.cluster("static-sp").instances) == 4


@pytest.mark.parametrize(
    ("device", "num_hosts", "policy", "serves"),
    [
        ("cpu", 1, "esp", Service.ALL),
        ("cpu", 2, "infinite", Service.ALL),
        ("h200", 1, "infinite", Service.OWN_HOST),
        ("h200", 2, "esp", Service.OWN_HOST),
        ("h200", 2, "infinite", Service.ALL),
    ],
)
def test_instances_serve_what_workers_do_unless_the_policy_cannot_run_so(
    device: str, num_hosts: int, policy: str, serves: Service
) -> None:
    hardware = Hardware(shape_of(CONFIG), device, num_instances=2, tp_size=2, num_hosts=num_hosts)
    assert {instance.serves for instance in hardware.cluster(policy).instances} == {serves}
    of_workers = ClusterConfig("some-model", num_instances=2, tp_size=2, device=device).instances
    is_more = serves not in {instance.serves for instance in of_workers}
    assert hardware.assumes_more_service(policy) is is_more


def test_instances_are_spread_over_hosts_and_links_between_them_are_slower() -> None:
    one, two = (Hardware(LLAMA, "h200", num_instances=4, num_hosts=n).cluster("esp") for n in (1, 2))
    assert [instance.host_id for instance in one.instances] == [0, 0, 0, 0]
    assert [instance.host_id for instance in two.instances] == [0, 0, 1, 1]
    assert one.cost_model.migration_time(1000, 0, 1) == two.cost_model.migration_time(1000, 0, 1)
    assert one.cost_model.migration_time(1000, 1, 2) < two.cost_model.migration_time(1000, 1, 2)
    with pytest.raises(
        ConfigError, match="--policy tp makes one instance of all, which cannot span --num-hosts 2"
    ):
        Hardware(LLAMA, "h200", num_instances=4, num_hosts=2).cluster("tp")


def test_more_hosts_than_instances_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--num-hosts is 3, but --num-instances is 2$"):
        Hardware(LLAMA, "h200", num_instances=2, num_hosts=3)


def test_the_pools_asked_for_are_the_same_in_all_policies() -> None:
    hardware = Hardware(LLAMA, "h200", num_instances=4, kv_cache_tokens=1000)
    assert hardware.cluster("tp").max_request_tokens == 4000
    assert hardware.cluster("static-sp").max_request_tokens == 4000
    assert hardware.cluster("replicas").max_request_tokens == 1000


def test_weights_that_are_held_once_leave_more_room_than_weights_held_by_all() -> None:
    hardware = Hardware(LLAMA, "h200", num_instances=4)
    assert hardware.cluster("tp").max_request_tokens > hardware.cluster("static-sp").max_request_tokens


def test_pools_on_processors_are_no_larger_than_a_server_makes_them() -> None:
    hardware = Hardware(shape_of(CONFIG), "cpu", num_instances=2)
    assert hardware.cluster("replicas").max_request_tokens == MAX_AUTO_TOKENS
    assert hardware.cluster("tp").max_request_tokens == 2 * MAX_AUTO_TOKENS


def test_an_unloaded_prefill_is_the_quickest_that_the_cluster_can_do() -> None:
    one, eight = (Hardware(LLAMA, "h200", n).unloaded_prefill() for n in (1, 8))
    assert one(500_000) / 8 <= eight(500_000) <= 1.3 * one(500_000) / 8  # keys come in parts
    assert eight(10) == pytest.approx(one(10), rel=0.05)


@pytest.mark.parametrize(
    ("device", "policy", "named"),
    [
        ("abacus", "esp", "--device 'abacus'"),
        ("h200", "magic", "policy 'magic'"),
        ("cpu", "esp", "no room for KV on 1 x cpu"),
    ],
)
def test_what_cannot_be_simulated_is_named(device: str, policy: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Hardware(LLAMA, device, num_instances=2).cluster(policy)


@pytest.mark.parametrize("kv_cache_tokens", [None, 1000])
@pytest.mark.parametrize("policy", ["tp", "chunked"])
@pytest.mark.parametrize("num_instances", [3, 16])
def test_more_devices_than_one_instance_can_use_are_refused_by_policy_and_flag(
    num_instances: int, policy: str, kv_cache_tokens: int | None
) -> None:
    hardware = Hardware(LLAMA, "h200", num_instances, kv_cache_tokens=kv_cache_tokens)
    assert len(hardware.cluster("chunked-replicas").instances) == num_instances
    with pytest.raises(ConfigError, match=f"--policy {policy} .* --num-instances {num_instances}; .* 8 KV"):
        hardware.cluster(policy)


def test_a_measured_cost_model_is_used_for_the_number_of_devices_it_is_of() -> None:
    measured = tuple(
        CostModelFile(
            format=FORMAT,
            model="llama-3.1-8b",
            shape=asdict(LLAMA),
            tp_size=tp_size,
            device="h200",
            num_instances=1,
            date="",
            versions={},
            machine={},
            coefficients=asdict(Coefficients(step=float(tp_size))),
            overlap=0.0,
            undetermined=[],
            graph_limits=asdict(NO_GRAPHS),
            host=asdict(DEFAULT_HOST),
            lane=asdict(ServiceLane()),
            ranges={},
            repeat_spread=0.0,
            errors={},
            links=asdict(DEVICES["h200"].links),
        )
        for tp_size in (1, 4)
    )
    hardware = Hardware(LLAMA, "h200", num_instances=4, measured=measured)
    overheads = [hardware.cluster(p).cost_model.prefill_terms(1).overhead for p in ("replicas", "tp")]
    assert overheads == [1.0, 4.0]
    with pytest.raises(ConfigError, match="no --cost-model is of --tensor-parallel-size 2"):
        Hardware(LLAMA, "h200", num_instances=2, measured=measured).cluster("tp")
    with pytest.raises(ConfigError, match="with device h200, but"):
        Hardware(LLAMA, "h100", num_instances=4, measured=measured).cluster("tp")
