import argparse
from dataclasses import fields

import pytest

from loong.launcher.policy_flags import add_policy_flags, policy_config
from loong.scheduler.config import Fairness, PolicyConfig


def parsed(*flags: str) -> PolicyConfig:
    parser = argparse.ArgumentParser()
    add_policy_flags(parser.add_argument_group())
    return policy_config(parser.parse_args(flags))


def test_no_flag_is_the_default() -> None:
    assert parsed() == PolicyConfig()


@pytest.mark.parametrize("field", [field.name for field in fields(PolicyConfig)])
def test_every_choice_has_a_flag(field: str) -> None:
    flag = "--" + field.replace("_", "-")
    text, value = {"fairness": ("user", Fairness.USER), "deferred_share": ("0", 0)}.get(field, ("7", 7))
    changed = parsed(flag, text)
    assert changed != PolicyConfig()
    assert getattr(changed, field) == value
