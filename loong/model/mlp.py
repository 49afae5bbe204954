"""The part of a layer after its attention: another kind of MLP is another class."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from loong.core.activation import Activation
from loong.model.device import Device
from loong.model.expert_weight import ExpertWeight
from loong.model.weight import Weight

_MOST_ROWS = 16_384  # at a time: gate and up are several times as wide as hidden states
_MOST_PAIRS = 65_536  # of a token and an expert, at a time
_ROWS_AN_EXPERT = 256  # from which on products have the largest blocks


class MLP(Protocol):
    """A function of each token by itself, as one rank holds it."""

    def apply(self, x: Tensor, device: Device) -> Tensor:
        """Return this rank's part of the results [T, E] for x [T, E]. The sum over ranks is the result."""

    def load_products(self, device: Device, most_rows: int) -> None:
        """Load kernels of `apply` for x of at most `most_rows` rows; see `Device.load_products`."""


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """`down(activation(gate) * up)`. See MLP."""

    gate_up: Weight  # out: this rank's gates, then ups
    down: Weight
    activation: Activation

    def apply(self, x: Tensor, device: Device) -> Tensor:
        """See MLP."""
        if len(x) <= _MOST_ROWS:
            gate_up = self.gate_up.apply(x, device)
            gated = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
            device.activate_and_mul(gate_up, self.activation, out=gated)
            return self.down.apply(gated, device)
        out = torch.empty_like(x)
        for rows, target in zip(torch.split(x, _MOST_ROWS), torch.split(out, _MOST_ROWS), strict=True):
            target.copy_(self.apply(rows, device))
        return out

    def load_products(self, device: Device, most_rows: int) -> None:
        """See MLP."""
        for weight in (self.gate_up, self.down):
            weight.load_products(device, most_rows)


@dataclass(frozen=True, slots=True)
class ExpertMLP:
    """Gated MLPs, of which each token chooses a few: the sum of their results, by the router's weights.

    Every rank chooses the same experts and has a part of each. A token's result does not depend on how its
    experts are shared with others: each is a row of one product, and they are added in the order of choice.
    """

    router: Weight  # out: the experts
    gate_up: ExpertWeight  # out: this rank's gates, then ups
    down: ExpertWeight
    num_chosen: int
    is_normalized: bool  # the weights of the chosen ones sum to 1
    activation: Activation
    gate_up_bias: Tensor | None = None  # [X, out of gate_up]
    down_bias: Tensor | None = None  # [X, E], on rank 0 alone

    def apply(self, x: Tensor, device: Device) -> Tensor:
        """See MLP."""
        out = torch.empty_like(x)
        most_rows = max(1, _MOST_PAIRS // self.num_chosen)
        for rows, target in zip(torch.split(x, most_rows), torch.split(out, most_rows), strict=True):
            chosen, weights = self.choose(rows, device)
            groups = device.group_pairs(chosen, self.gate_up.num_experts)
            gate_up = _biased(self.gate_up.apply(rows, groups, device), self.gate_up_bias, chosen)
            gated = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
            device.activate_and_mul(gate_up, self.activation, out=gated)
            parts = _biased(self.down.apply(gated, groups, device), self.down_bias, chosen)
            device.expert_sum(parts.view(len(rows), self.num_chosen, x.shape[1]), weights, out=target)
        return out

    def choose(self, x: Tensor, device: Device) -> tuple[Tensor, Tensor]:
        """Return the experts of each token, chosen [T, C] int64, and their weights [T, C] float32."""
        logits = self.router.apply(x, device)
        return device.choose_experts(logits, self.num_chosen, is_normalized=self.is_normalized)

    def load_products(self, device: Device, most_rows: int) -> None:
        """See MLP. The sizes of blocks change with the number of pairs."""
        self.router.load_products(device, most_rows)
        num_rows = 1
        while num_rows <= min(most_rows, self.gate_up.num_experts * _ROWS_AN_EXPERT):
            self.apply(self.gate_up.zeros(num_rows), device)
            num_rows *= 2


def _biased(products: Tensor, bias: Tensor | None, chosen: Tensor) -> Tensor:
    """Add the bias [X, N] of each pair's expert to products [P, N]; None: no bias."""
    return products if bias is None else products.add_(bias[chosen.flatten()])
