"""The numbers of FP8 (e4m3) rows with scales."""

from typing import Final

import torch

FP8: Final = torch.float8_e4m3fn
LARGEST: Final = 448.0
LEAST_SCALE: Final = 1e-12
