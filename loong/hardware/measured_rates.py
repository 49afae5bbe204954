"""The rates of a GPU of which nothing is known, measured in a few seconds."""

import time
from collections.abc import Callable

import msgspec

from loong.hardware.devices import like_h200
from loong.scheduler.cost.roofline import DeviceRates

_SECONDS = 1.0  # of each measurement
_NUM_BYTES, _SIZE = 1 << 28, 4096  # of a copy, and of the sides of a product


class MeasuredRates(msgspec.Struct, frozen=True):
    """Bytes and FLOP a second."""

    memory_bandwidth: float
    host_bandwidth: float
    flops: float

    def device_rates(self, memory_bytes: float) -> DeviceRates:
        """Return the rates of a device. Its link to others is taken to be as fast as the one to the host."""
        return like_h200(
            flops=self.flops,
            memory_bandwidth=self.memory_bandwidth,
            memory_bytes=memory_bytes,
            link_bandwidth=self.host_bandwidth,
            host_bandwidth=self.host_bandwidth,
        )


def measure(
    device_name: str, num_bytes: int = _NUM_BYTES, size: int = _SIZE, seconds: float = _SECONDS
) -> MeasuredRates:
    """Measure copies within a device and from the host, and a product of two-byte floats."""
    import torch  # which takes a while

    device = torch.device(device_name)
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    on_host = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    target, matrix = torch.empty_like(source), torch.zeros(size, size, dtype=torch.bfloat16, device=device)

    def rate(call: Callable[[], object]) -> float:
        """Return calls a second."""
        wait = torch.cuda.synchronize if device.type == "cuda" else time.perf_counter
        call()
        wait()
        begin, number = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - begin) < seconds or not number:
            call()
            wait()
            number += 1
        return number / elapsed

    return MeasuredRates(
        memory_bandwidth=2 * num_bytes * rate(lambda: target.copy_(source)),  # read and written
        host_bandwidth=num_bytes * rate(lambda: target.copy_(on_host, non_blocking=True)),
        flops=2 * size**3 * rate(lambda: matrix @ matrix),
    )


def main() -> None:
    """Write the rates of the first GPU to standard output."""
    import sys

    sys.stdout.buffer.write(msgspec.json.encode(measure("cuda:0")))
