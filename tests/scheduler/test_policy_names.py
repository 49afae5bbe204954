import pytest
from simulation import instances_with

from loong.core.errors import ConfigError
from loong.core.instance import ElasticInstance, InstanceKind
from loong.scheduler.config import PolicyConfig
from loong.scheduler.policy import admissible_tokens, make_policy


def test_an_unknown_policy_is_named_beside_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"esp, replicas, static-sp, tp, but is 'magic'"):
        make_policy("magic", PolicyConfig())


@pytest.mark.parametrize("field", ["target_ttft", "max_num_batched_tokens", "lease_steps"])
def test_a_config_of_nothing_is_refused(field: str) -> None:
    flag = field.replace("_", "-")
    with pytest.raises(ConfigError, match=rf"{field} \(--{flag}\) must be above 0, but is 0"):
        PolicyConfig(**{field: 0})


def test_tp_runs_one_instance() -> None:
    assert admissible_tokens("tp", instances_with([100])) == 100
    with pytest.raises(ConfigError, match="policy tp runs 1 instance, but there are 2"):
        admissible_tokens("tp", instances_with([100, 100]))


def test_a_request_may_fill_the_cluster_unless_it_cannot_be_spread() -> None:
    instances = (*instances_with([100, 300]), ElasticInstance(2, 1, InstanceKind.HOST, 1000))
    assert admissible_tokens("esp", instances) == 400
    assert admissible_tokens("static-sp", instances) == 400
    assert admissible_tokens("replicas", instances) == 300
