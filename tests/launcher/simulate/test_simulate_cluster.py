import pytest

from loong.core.errors import ConfigError
from loong.launcher.simulate.cluster import Hardware, shape_of
from loong.model.shapes import SHAPES

LLAMA = shape_of(SHAPES["llama-3.1-8b"])


def test_a_shape_counts_the_parameters_of_the_model() -> None:
    num_parameters = LLAMA.num_layer_parameters + 2 * LLAMA.num_output_parameters
    assert num_parameters == pytest.approx(8.03e9, rel=1e-3)
    assert LLAMA.kv_bytes == SHAPES["llama-3.1-8b"].kv_bytes_per_token


def test_a_policy_of_one_instance_gets_all_devices_in_one() -> None:
    hardware = Hardware(LLAMA, "h200", num_instances=4, tp_size=2)
    [instance] = hardware.cluster("tp").instances
    assert instance.tp_size == 8
    assert len(hardware.cluster("static-sp").instances) == 4


def test_the_pools_asked_for_are_the_same_in_all_whoever_has_them() -> None:
    hardware = Hardware(LLAMA, "h200", num_instances=4, kv_cache_tokens=1000)
    assert hardware.cluster("tp").max_request_tokens == 4000
    assert hardware.cluster("static-sp").max_request_tokens == 4000
    assert hardware.cluster("replicas").max_request_tokens == 1000


def test_weights_that_are_held_once_leave_more_room_than_weights_held_by_all() -> None:
    hardware = Hardware(LLAMA, "h200", num_instances=4)
    assert hardware.cluster("tp").max_request_tokens > hardware.cluster("static-sp").max_request_tokens


def test_an_unloaded_prefill_is_the_quickest_that_the_cluster_can_do() -> None:
    one, eight = (Hardware(LLAMA, "h200", n).unloaded_prefill() for n in (1, 8))
    assert eight(500_000) == pytest.approx(one(500_000) / 8, rel=0.05)
    assert eight(10) == pytest.approx(one(10), rel=0.05)


@pytest.mark.parametrize(
    ("device", "policy", "named"),
    [
        ("abacus", "esp", "--device 'abacus'"),
        ("h200", "magic", "--policy 'magic'"),
        ("cpu", "esp", "no room for KV on 1 x cpu"),
    ],
)
def test_what_cannot_be_simulated_is_named(device: str, policy: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Hardware(LLAMA, device, num_instances=2).cluster(policy)
