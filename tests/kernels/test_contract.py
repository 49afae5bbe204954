import pytest
import torch

from loong.kernels import Dims


def test_a_letter_keeps_the_size_that_bound_it_first() -> None:
    dims = Dims()
    dims.bind("q", torch.zeros(5, 4, 16), "T H D")
    assert (dims["T"], dims["H"], dims["D"]) == (5, 4, 16)
    with pytest.raises(ValueError, match="k must have D=16 as q has, got D=8"):
        dims.bind("k", torch.zeros(3, 2, 8), "S K D")


def test_a_wrong_rank_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"q must have shape \[T, H, D\], got \[2, 3\]"):
        Dims().bind("q", torch.zeros(2, 3), "T H D")


def test_a_wrong_dtype_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"lse must be torch.float32, got torch.float64"):
        Dims().bind("lse", torch.zeros(2, 3, dtype=torch.float64), "T H", torch.float32)


def test_strides_are_refused_unless_asked_for() -> None:
    pool = torch.zeros(7, 2, 3, 4)
    with pytest.raises(ValueError, match=r"k must be contiguous, got strides"):
        Dims().bind("k", pool[:, 0], "S K D")
    Dims().bind("k", pool[:, 0], "S K D", is_contiguous=False)
