"""The tiles that a library computes are measured on the local GPU."""

import pytest

from loong.model.cuda_device import CudaDevice
from loong.model.shapes import find_config
from loong.model.tensor_parallel import Shard
from loong.model.tile_sizes import measured_tile_sizes
from loong.worker.kv.pool import KVPool

pytestmark = pytest.mark.gpu


def test_sizes_that_were_measured_can_be_planned() -> None:
    config = find_config("llama-3.1-8b", "dummy")
    sizes = measured_tile_sizes(config, tp_size=2, index=0)
    assert sizes is not None
    assert sizes.square % sizes.many_queries == sizes.square % sizes.keys == 0
    assert sizes.least_queries >= sizes.few_queries
    shard, device = Shard(config, size=2), CudaDevice(0, config.torch_dtype, sizes)
    pool = KVPool(shard.kv_layout, 1, device.torch_device)
    device.plan_attention(shard.zero_queries(1, device.torch_device), pool.layer(0))


def test_a_dtype_that_the_library_does_not_take_has_none() -> None:
    assert measured_tile_sizes(find_config("llama-3.1-8b", "dummy", "float32"), tp_size=1, index=0) is None
