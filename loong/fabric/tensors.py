"""The tensors that can be messages."""

import torch
from torch import Tensor

from loong.fabric.errors import InvalidMessageError


def is_message(tensor: Tensor, device: torch.device) -> bool:
    """Return whether a tensor is not empty. Raises if it is not contiguous, or not on `device`."""
    if not tensor.is_contiguous():
        raise InvalidMessageError(
            f"a tensor {tuple(tensor.shape)} with strides {tensor.stride()} is not contiguous"
        )
    if tensor.device != device:
        raise InvalidMessageError(f"a tensor on {tensor.device} cannot travel from {device}")
    return tensor.numel() > 0
