"""Matrix products use as many multiprocessors as they are given, and give the same results."""

from pathlib import Path

import msgspec
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from loong.kernels.processors import products_on

pytestmark = pytest.mark.gpu

NUM_LEFT = 12  # multiprocessors


def test_products_run_on_as_many_multiprocessors_as_they_are_given_and_are_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 4096, 4096, dtype=torch.bfloat16, device="cuda") / 64
    everywhere, all_programs = _product(x, weight, tmp_path)
    num_given = torch.cuda.get_device_properties(0).multi_processor_count - NUM_LEFT
    with products_on(num_given):
        there, programs = _product(x, weight, tmp_path)
    afterwards, programs_afterwards = _product(x, weight, tmp_path)
    assert programs <= num_given < all_programs == programs_afterwards
    assert torch.equal(everywhere, afterwards)
    torch.testing.assert_close(there, everywhere, atol=0.01, rtol=0.01)


def _product(x: torch.Tensor, weight: torch.Tensor, folder: Path) -> tuple[torch.Tensor, int]:
    """Return x @ weight.T, and the programs of the largest kernel that computes it."""
    x @ weight.T  # loads the kernel
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        product = x @ weight.T
        torch.cuda.synchronize()
    trace = folder / "trace.json"
    profiler.export_chrome_trace(str(trace))
    events = msgspec.json.decode(trace.read_bytes())["traceEvents"]
    grids = [event["args"]["grid"] for event in events if "grid" in event.get("args", {})]
    return product, max(grid[0] * grid[1] * grid[2] for grid in grids)
