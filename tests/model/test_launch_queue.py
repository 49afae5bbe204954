"""A thread that launches far ahead of the device does not keep other threads from launching."""

from threading import Thread
from time import monotonic, sleep

import pytest
import torch
from device_waits import DeviceWait

from loong.model.cuda_device import CudaDevice

pytestmark = pytest.mark.gpu

NUM_PRODUCTS = 3000  # more than the driver queues
LIMIT = 20.0  # seconds, after which the device waits no longer


@pytest.mark.parametrize("is_shared", [False, True])
def test_another_thread_launches_what_a_thread_that_is_far_ahead_waits_for(is_shared: bool) -> None:
    torch.cuda.init()  # type: ignore[no-untyped-call]  # torch's own
    device = CudaDevice(0, torch.float32)
    other: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's own
    x = torch.ones(8, 8, device="cuda")
    wait = DeviceWait(LIMIT)
    device.linear(x, x, None)
    torch.cuda.synchronize()
    num_launched = 0

    def launch() -> None:
        nonlocal num_launched
        device.use()
        wait.launch()
        for _ in range(NUM_PRODUCTS):
            if is_shared:
                with device.shared():
                    device.linear(x, x, None)
            else:
                device.linear(x, x, None)
            num_launched += 1

    thread = Thread(target=launch)
    thread.start()
    seen, since = 0, monotonic()
    while monotonic() - since < 0.5:  # until it waits for room
        if num_launched > seen:
            seen, since = num_launched, monotonic()
        sleep(0.01)
    assert 0 < seen < NUM_PRODUCTS
    with torch.cuda.stream(other):
        wait.end()
    thread.join()
    torch.cuda.synchronize()
    assert not wait.has_timed_out, "the wait ended by its deadline"
    assert num_launched == NUM_PRODUCTS
