"""A thread that launches far ahead of the device does not keep other threads from launching."""

from collections.abc import Callable
from threading import Thread
from time import monotonic, sleep

import pytest
import torch
from device_waits import DeviceWait

from loong.kernels import Partial
from loong.kernels.attend_task import AttendTask
from loong.model.cuda_device import CudaDevice
from loong.model.short_kernels import SHORT_ROWS, short_width

pytestmark = pytest.mark.gpu

NUM_LAUNCHES = 3000  # more than the driver queues
NUM_TURNS = 60  # that a table of attention has
LIMIT = 20.0  # seconds, after which the device waits no longer


def product(device: CudaDevice) -> Callable[[], None]:
    x = torch.ones(8, 8, device="cuda")

    def compute() -> None:
        device.linear(x, x, None)

    return compute


def product_on_shared_device(device: CudaDevice) -> Callable[[], None]:
    compute = product(device)

    def compute_shared() -> None:
        with device.shared():
            compute()

    return compute_shared


def attention_in_turns(device: CudaDevice) -> Callable[[], None]:
    q = torch.ones(SHORT_ROWS, 1, 64, device="cuda")
    kv = torch.ones(NUM_TURNS * short_width(SHORT_ROWS), 2, 1, 64, device="cuda")
    total = Partial.unseen(q, is_merged=True)
    with device.shared():
        table = device.table([AttendTask.full(0, len(q), 0, len(kv))])
    assert len(table.turns) == NUM_TURNS
    return lambda: device.attend_blocks(q, kv, table, scale=1.0, total=total)


@pytest.mark.parametrize(
    ("making", "launches_a_call"),
    [(product, 1), (product_on_shared_device, 1), (attention_in_turns, NUM_TURNS)],
)
def test_another_thread_launches_what_a_thread_that_is_far_ahead_waits_for(
    making: Callable[[CudaDevice], Callable[[], None]], launches_a_call: int
) -> None:
    torch.cuda.init()  # type: ignore[no-untyped-call]  # torch's own
    device = CudaDevice(0, torch.float32)
    other: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's own
    wait = DeviceWait(LIMIT)
    compute, num_calls = making(device), NUM_LAUNCHES // launches_a_call
    compute()
    torch.cuda.synchronize()
    num_computed = 0

    def launch() -> None:
        nonlocal num_computed
        device.use()
        wait.launch()
        for _ in range(num_calls):
            compute()
            num_computed += 1

    thread = Thread(target=launch)
    thread.start()
    try:
        seen, since = 0, monotonic()
        while monotonic() - since < 0.5:  # until it waits for room
            if num_computed > seen:
                seen, since = num_computed, monotonic()
            sleep(0.01)
        assert 0 < seen < num_calls
    finally:
        with torch.cuda.stream(other):
            wait.end()
        thread.join()
        torch.cuda.synchronize()
    assert not wait.has_timed_out, "the wait ended by its deadline"
    assert num_computed == num_calls
