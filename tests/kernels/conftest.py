import interpreted_kernels  # noqa: F401
import pytest
import torch

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
# Triton's interpreter multiplies bfloat16 as if it were integers.
INTERPRETED = [(CPU, torch.float32), (CPU, torch.float16)]
ON_GPU = [(CUDA, torch.float32), (CUDA, torch.float16), (CUDA, torch.bfloat16)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test of `device`, or of `device` and `dtype`, both interpreted and on the GPU."""
    if {"device", "dtype"} <= set(metafunc.fixturenames):
        cases = [*INTERPRETED, *(pytest.param(*case, marks=pytest.mark.gpu) for case in ON_GPU)]
        metafunc.parametrize(("device", "dtype"), cases, ids=str)
    elif "device" in metafunc.fixturenames:
        metafunc.parametrize("device", [CPU, pytest.param(CUDA, marks=pytest.mark.gpu)], ids=str)
