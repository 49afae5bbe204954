"""The tensors of experts: each apart, all in one as GGUF files have them, and as checkpoints have them.

Checkpoints of gpt-oss have [X, inputs, outputs] and biases [X, outputs], where gates and ups alternate.
"""

import re

import torch
from torch import Tensor

_EXPERTS, _EXPERT = ".experts.", re.compile(r"\.experts\.[0-9]\.")  # fewer than ten of them
_PAIR, _HALVES = "gate_up_proj", ("gate_proj", "up_proj")


def stacked_experts(checkpoint: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors, of which all of a layer's experts are in one: [X, outputs, inputs] or [X, outputs]."""
    found: dict[str, Tensor] = {}
    parts: dict[str, list[Tensor]] = {}
    for name, tensor in sorted(checkpoint.items()):
        if _EXPERT.search(name) is not None:
            parts.setdefault(_EXPERT.sub(_EXPERTS, name), []).append(tensor)
        elif _EXPERTS not in name:
            found[name] = tensor
        else:
            base, kind = _base_and_kind(name)
            rows = tensor if kind == "bias" else tensor.transpose(1, 2)
            names = [base.replace(_PAIR, half) for half in _HALVES] if _PAIR in base else [base]
            for number, own_name in enumerate(names):
                found[f"{own_name}.{kind}"] = rows[:, number :: len(names)].contiguous()
    return found | {name: torch.stack(stack) for name, stack in parts.items()}


def of_each_expert(checkpoint: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors, of which those of a layer's experts are apart."""
    return _cut(stacked_experts(checkpoint))


def _cut(stacked: dict[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, tensor in stacked.items():
        if _EXPERTS in name:
            for number, part in enumerate(tensor):
                found[name.replace(_EXPERTS, f"{_EXPERTS}{number}.")] = part.clone()
        else:
            found[name] = tensor
    return found


def as_in_checkpoint(checkpoint: dict[str, Tensor], stacked: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors `stacked` by the names, and in the form, that they have in a checkpoint."""
    parts = _cut(stacked) if any(map(_EXPERT.search, checkpoint)) else stacked
    found: dict[str, Tensor] = {}
    for name in checkpoint:
        if name in parts:
            found[name] = parts[name]
            continue
        base, kind = _base_and_kind(name)
        names = [base.replace(_PAIR, half) for half in _HALVES] if _PAIR in base else [base]
        rows = torch.stack([stacked[f"{own_name}.{kind}"] for own_name in names], 2).flatten(1, 2)
        found[name] = (rows if kind == "bias" else rows.transpose(1, 2)).contiguous()
    return found


def _base_and_kind(name: str) -> tuple[str, str]:
    """Return a name of gpt-oss's without its ending, and what it is of."""
    return name.removesuffix("_bias"), "bias" if name.endswith("_bias") else "weight"
