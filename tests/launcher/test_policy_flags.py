import argparse
from dataclasses import fields
from math import inf

import pytest

from loong.launcher.policy_flags import POLICY_NAMES, add_policy_flags, policy_config
from loong.scheduler.config import AdmissionRule, Fairness, PolicyConfig


def parsed(*flags: str) -> PolicyConfig:
    parser = argparse.ArgumentParser()
    add_policy_flags(parser.add_argument_group())
    return policy_config(parser.parse_args(flags))


def test_no_flag_is_the_default() -> None:
    assert parsed() == PolicyConfig()


CHOICES = [field.name for field in fields(PolicyConfig) if field.name != "max_loan"]  # by --lend


@pytest.mark.parametrize("field", CHOICES)
def test_every_choice_has_a_flag(field: str) -> None:
    flag = "--" + field.replace("_", "-")
    others: dict[str, tuple[str, object]] = {
        "fairness": ("user", Fairness.USER),
        "admission": ("strict", AdmissionRule.STRICT),
        "deferred_share": ("0", 0),
        "router_token_ratio": ("0.5", 0.5),
    }
    text, value = others.get(field, ("7", 7))
    changed = parsed(flag, text)
    assert changed != PolicyConfig()
    assert getattr(changed, field) == value


def test_targets_can_be_none() -> None:
    config = parsed("--target-ttft", "none", "--target-tpot", "none")
    assert (config.target_ttft, config.target_tpot) == (inf, inf)


def test_names_of_policies_have_those_of_fixed_groups_of_any_size() -> None:
    tried = ("esp", "esp-fixed-0", "esp-fixed-1", "esp-fixed-12", "esp", "esp-fixed-N", "swift")
    assert [name for name in tried if name in POLICY_NAMES] == [
        *("esp", "esp-fixed-1", "esp-fixed-12", "esp")
    ]
