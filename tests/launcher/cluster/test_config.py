"""Configurations of clusters that cannot be started are refused."""

import pytest

from loong.core.errors import ConfigError
from loong.launcher.cluster.config import ClusterConfig


def test_a_size_below_one_is_named_with_what_it_is() -> None:
    with pytest.raises(ConfigError, match=r"^num_instances must be at least 1, but is 0$"):
        ClusterConfig("some-model", num_instances=0)
    with pytest.raises(ConfigError, match=r"^tp_size must be at least 1, but is 0$"):
        ClusterConfig("some-model", tp_size=0)
    with pytest.raises(ConfigError, match=r"^kv_capacity must be at least 1, but is -1$"):
        ClusterConfig("some-model", kv_capacity=-1)
