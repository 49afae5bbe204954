"""The names of policies, and the instances that each can run."""

import re
from dataclasses import fields, replace
from math import nan
from pathlib import Path

import pytest
from simulation import instances_with

from loong.core.errors import ConfigError
from loong.core.instance import ElasticInstance, InstanceKind, Service
from loong.scheduler.config import MOST_LEASE_STEPS, AdmissionRule, Fairness, PolicyConfig
from loong.scheduler.policy import (
    NAMES,
    POLICIES,
    admissible_tokens,
    check_instances,
    fair_baselines,
    make_policy,
    policy_kind,
)

COMPARED = {
    "chunked",
    "chunked-replicas",
    "esp",
    "esp-paper",
    "infinite",
    "lightllm",
    "replicas",
    "static-sp",
    "tp",
    "vllm-m",
    "vllm-s",
}
NUMBERS = [field for field in fields(PolicyConfig) if field.type not in (Fairness, AdmissionRule)]
WRONG = [(field.name, value) for field in NUMBERS for value in (-1, nan)]
SHARES = ("deferred_share", "router_token_ratio")
WRONG += [(field.name, 0) for field in NUMBERS if field.name not in SHARES]
WRONG += [(field.name, 1.5) for field in NUMBERS if field.type is int or field.name in SHARES]
WRONG += [("lease_steps", MOST_LEASE_STEPS + 1)]


def test_the_policies_to_compare_with_exist() -> None:
    assert POLICIES.keys() >= COMPARED


def test_the_page_of_policies_reports_each_and_of_each_flag() -> None:
    page = (Path(__file__).parents[2] / "docs" / "policies.md").read_text()
    names = {field.name for field in fields(PolicyConfig)} - {"max_loan"}  # which follows from --lend
    flags = {f"`--{name.replace('_', '-')} " for name in names}
    assert [name for name in POLICIES if f"`{name}`" not in page] == []
    assert [flag for flag in flags if flag not in page] == []


def test_an_unknown_policy_is_named_beside_those_that_exist() -> None:
    known = re.escape(", ".join(NAMES))
    with pytest.raises(ConfigError, match=rf"^policy 'magic' is none of {known}$"):
        make_policy("magic", PolicyConfig())


@pytest.mark.parametrize(
    "name", ["esp-fixed-", "esp-fixed-0", "esp-fixed-02", "esp-fixed--1", "esp-fixed-x", "esp-fixed-N"]
)
def test_fixed_groups_have_a_size_above_0(name: str) -> None:
    asked = r"did you mean esp-fixed-N\? N is a number of instances that divides --num-instances$"
    with pytest.raises(ConfigError, match=rf"^policy '{name}' is none of .*; {asked}"):
        policy_kind(name)


def test_fixed_groups_have_any_size() -> None:
    assert {size: policy_kind(f"esp-fixed-{size}").group_size for size in (1, 12)} == {1: 1, 12: 12}


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_value_that_cannot_be_is_refused_by_the_name_of_its_flag(name: str, value: float) -> None:
    with pytest.raises(
        ConfigError, match=rf"{name} \(--{name.replace('_', '-')}\) must be .*, but is {value}"
    ):
        PolicyConfig(**{name: value})  # type: ignore[arg-type]  # the names differ in type


@pytest.mark.parametrize("name", ["tp", "chunked", "vllm-s"])
def test_tensor_parallelism_runs_one_instance(name: str) -> None:
    assert admissible_tokens(name, instances_with([100])) == 100
    with pytest.raises(ConfigError, match=f"policy {name} runs 1 instance, but there are 2"):
        admissible_tokens(name, instances_with([100, 100]))


@pytest.mark.parametrize("name", ["disaggregated-1", "esp-disaggregated-1"])
def test_prefill_and_decode_apart_need_two_instances(name: str) -> None:
    assert admissible_tokens(name, instances_with([100, 100])) == 100
    with pytest.raises(
        ConfigError, match=f"policy {name} runs at least 2 instances, 1 of them for decodes, but there are 1"
    ):
        admissible_tokens(name, instances_with([100]))


def test_some_instances_are_left_for_prompts() -> None:
    with pytest.raises(ConfigError, match="at least 3 instances, 2 of them for decodes, but there are 2"):
        admissible_tokens("esp-disaggregated-2", instances_with([100, 100]))


def test_a_request_may_fill_the_cluster_unless_it_cannot_be_spread() -> None:
    instances = (*instances_with([100, 300]), ElasticInstance(2, 1, InstanceKind.HOST, 1000))
    for name in ("esp", "esp-paper", "infinite", "static-sp"):
        assert admissible_tokens(name, instances) == 400
    for name in ("replicas", "chunked-replicas"):
        assert admissible_tokens(name, instances) == 300
    assert admissible_tokens("disaggregated-1", instances) == 100


@pytest.mark.parametrize(("serves", "host_id"), [(Service.NONE, 0), (Service.OWN_HOST, 1)])
def test_a_policy_of_lenders_needs_instances_that_serve_each_other(serves: Service, host_id: int) -> None:
    first, second = instances_with([100] * 2, serves)
    instances = first, replace(second, host_id=host_id)
    with pytest.raises(ConfigError, match="policy infinite needs instances that attend for batches"):
        admissible_tokens("infinite", instances)
    assert admissible_tokens("esp", instances) == 200
    assert admissible_tokens("infinite", instances_with([100] * 2, Service.OWN_HOST)) == 200


def test_fair_baselines_are_one_group_and_splits_up_to_half() -> None:
    assert fair_baselines(1) == ()
    assert fair_baselines(5) == ("esp-fixed-5", "esp-disaggregated-1", "esp-disaggregated-2")
    for num_instances in range(2, 20):
        for name in fair_baselines(num_instances):
            check_instances(name, tuple(instances_with([100] * num_instances)))
