"""Products in parts, of new sizes, do not wait for work that the device has on other streams."""

import pytest
import torch
from device_waits import DeviceWait

from loong.model.cuda_device import CudaDevice

pytestmark = pytest.mark.gpu

SHAPES = ((6144, 4096), (8192, 4096), (4096, 14336))  # of weights
MOST_ROWS = 4096
LIMIT = 5.0  # seconds, after which the device waits no longer


def test_no_product_loads_a_kernel_late() -> None:
    torch.cuda.init()  # type: ignore[no-untyped-call]  # torch's own
    device = CudaDevice(0, torch.bfloat16)
    other: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's own
    wait = DeviceWait(LIMIT)
    weights = [torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for shape in SHAPES]
    rows = [torch.zeros(MOST_ROWS, width, dtype=torch.bfloat16, device="cuda") for _, width in SHAPES]
    for weight in weights:
        device.load_products(weight, None, MOST_ROWS)
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        wait.launch()
    for num_rows in range(1, MOST_ROWS, 13):
        for x, weight in zip(rows, weights, strict=True):
            with device.shared():
                device.linear(x[:num_rows], weight, None)
    torch.cuda.current_stream().synchronize()
    wait.end()
    torch.cuda.synchronize()
    assert not wait.has_timed_out, "the wait ended by its deadline, so a product waited for it"
