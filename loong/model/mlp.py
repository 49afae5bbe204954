"""The part of a layer after its attention: another kind of MLP is another class."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from loong.model.device import Device
from loong.model.weight import Weight

_MOST_ROWS = 16_384  # at a time: gate and up are several times as wide as hidden states


class MLP(Protocol):
    """A function of each token by itself, as one rank holds it."""

    def apply(self, x: Tensor, device: Device) -> Tensor:
        """Return this rank's part of the results [T, E] for x [T, E]. The sum over ranks is the result."""

    def load_products(self, device: Device, most_rows: int) -> None:
        """Load kernels of `apply` for x of at most `most_rows` rows; see `Device.load_products`."""


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """`down(silu(gate) * up)`. See MLP."""

    gate_up: Weight  # out: this rank's gates, then ups
    down: Weight

    def apply(self, x: Tensor, device: Device) -> Tensor:
        """See MLP."""
        if len(x) <= _MOST_ROWS:
            gate_up = self.gate_up.apply(x, device)
            gated = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
            device.silu_and_mul(gate_up, out=gated)
            return self.down.apply(gated, device)
        out = torch.empty_like(x)
        for rows, target in zip(torch.split(x, _MOST_ROWS), torch.split(out, _MOST_ROWS), strict=True):
            target.copy_(self.apply(rows, device))
        return out

    def load_products(self, device: Device, most_rows: int) -> None:
        """See MLP."""
        for weight in (self.gate_up, self.down):
            weight.load_products(device, most_rows)
