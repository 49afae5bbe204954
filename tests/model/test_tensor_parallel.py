from dataclasses import replace

import pytest
import torch

from loong.core.errors import ConfigError
from loong.model.shapes import SHAPES
from loong.model.tensor_parallel import Shard, SingleDevice

CONFIG = SHAPES["llama-3.1-8b"]


def test_one_rank_needs_nobody() -> None:
    x = torch.ones(2)
    assert SingleDevice().all_reduce(x) is x
    assert SingleDevice().all_gather(x) is x


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("intermediate_size", [14336, 14337])
def test_the_ranks_hold_every_row_once(size: int, intermediate_size: int) -> None:
    config = replace(CONFIG, vocab_size=128257, intermediate_size=intermediate_size)
    shards = [Shard(config, rank, size) for rank in range(size)]
    widths = {"q_rows": 4096, "kv_rows": 1024, "mlp_rows": intermediate_size, "vocab_rows": 128257}
    for rows, width in widths.items():
        held = [row for shard in shards for row in range(width)[getattr(shard, rows)]]
        assert held == list(range(width))
    assert all(len(range(128257)[shard.vocab_rows]) <= shard.padded_vocab_size for shard in shards)


@pytest.mark.parametrize("size", [3, 16])
def test_a_size_that_does_not_divide_the_kv_heads_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=f"must divide num_kv_heads=8, got {size}"):
        Shard(CONFIG, 0, size)


def test_a_rank_outside_its_group_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rank must be in \[0, 2\), got 2"):
        Shard(CONFIG, 2, 2)
