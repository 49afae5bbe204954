"""Memory that one process writes for another is there, and missing memory is reported."""

import tempfile
from contextlib import closing
from pathlib import Path

import pytest
import torch
from host_arenas import HostMemory
from processes import run_on_ranks

from loong.core.errors import ClusterError, ConfigError
from loong.fabric.memory.arena import Arena, first_epoch, last_epoch
from loong.fabric.world import World
from loong.kernels.exchange.signals import signal, wait

NUM_BYTES = 1 << 20


def make_arena(directory: Path, rank: int, num_bytes: int = NUM_BYTES, deadline: float = 30.0) -> Arena:
    return Arena(directory, World(2, 1), rank, HostMemory(), num_bytes, deadline)


def set_flags_of_each_other(rank: int, directory: Path) -> list[int]:
    """Each sets its flag in both arenas, and waits for the other's in its own."""
    with closing(make_arena(directory, rank)) as arena:
        offset = arena.reserve(16)
        arena.meet(1 - rank)
        signal(arena.addresses, offset + 8 * rank, 0b11, 40 + rank, arena.deadline())
        wait(arena.memory, offset + 8 * (1 - rank), 41 - rank, 1 - rank, arena.deadline())
        return [int(flag) for flag in arena.view(offset, 2, dtype=torch.int64)]


def test_a_flag_set_by_one_process_is_seen_by_both() -> None:
    with tempfile.TemporaryDirectory(prefix="loong-") as directory:
        assert run_on_ranks(set_flags_of_each_other, 2, Path(directory)) == [[40, 41], [40, 41]]
        assert not [path for path in Path(directory).iterdir() if path.suffix == ".arena"]


def test_room_is_given_once_begins_empty_and_ends(tmp_path: Path) -> None:
    with closing(make_arena(tmp_path, 0)) as arena:
        first, second = arena.reserve(100), arena.reserve(1 << 20)
        arena.view(first, 100, dtype=torch.uint8).fill_(255)
        assert not arena.view(second, 1 << 20, dtype=torch.uint8).any()
        assert arena.addresses.tolist() == [arena.memory.data_ptr(), 0]
        with pytest.raises(ClusterError, match=r"an arena of 2097152 bytes has no room for \d+"):
            arena.reserve(1 << 20)


def test_a_missing_server_and_memory_of_another_size_are_errors(tmp_path: Path) -> None:
    with closing(make_arena(tmp_path, 0, deadline=0.01)) as arena:
        with pytest.raises(ClusterError, match=r"no process offered memory at .*1\.arena within 0\.01 s"):
            arena.meet(1)
        with (
            closing(make_arena(tmp_path, 1, num_bytes=5 << 20)),
            pytest.raises(ClusterError, match="memory of 6291456 bytes where 2097152 were expected"),
        ):
            arena.meet(1)


def test_epochs_of_one_batch_come_after_all_of_the_one_before() -> None:
    assert last_epoch(4) + 1 == first_epoch(5)


def test_more_processes_than_a_flag_has_bits_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="arenas are for 63 processes, but there are 64"):
        Arena(tmp_path, World(64, 1), 0, HostMemory(), NUM_BYTES, 1.0)
