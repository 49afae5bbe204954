"""The computation of a model of Hugging Face as a graph in which attention is one node a layer."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from loong.core.errors import ConfigError

NAMESPACE = "loong_split"
_MODELS = "transformers"


def read_config(path: Path, num_layers: int | None = None) -> Any:
    """Return the config of transformers of a config.json, or of a folder with one.

    `num_layers` replaces the model's own. Raises `ConfigError` if there is none that can be read, or if
    transformers is not installed.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise ConfigError(f"splitting needs the package {_MODELS}: pip install {_MODELS}") from error
    try:
        values = json.loads(file.read_bytes())
        model_type = values.pop("model_type")
        config = AutoConfig.for_model(model_type, **values)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"{file} is no config.json that {_MODELS} can read: {error}") from error
    if num_layers is not None:
        config.num_hidden_layers = num_layers
        if (kinds := getattr(config, "layer_types", None)) is not None:
            config.layer_types = kinds[:num_layers]
    return config


def build(config: Any, device: str = "meta", dtype: torch.dtype | None = None) -> nn.Module:
    """Return a model of random weights, or of none on the device `meta`, whose attention is one operator."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(NAMESPACE, _attend)
    _operator()
    with torch.device(device):
        model: nn.Module = AutoModelForCausalLM.from_config(
            config, attn_implementation=NAMESPACE, dtype=dtype or config.dtype or torch.float32
        )
    return model.eval()


def trace(model: nn.Module, num_tokens: int, device: str = "meta") -> GraphModule:
    """Return the graph from token ids and positions, each [1, T] int64, to logits [1, T, vocab]."""
    shape = 1, num_tokens
    inputs = torch.zeros(shape, dtype=torch.int64, device=device), torch.arange(num_tokens, device=device)
    with torch.no_grad():
        exported = torch.export.export(_Logits(model), (inputs[0], inputs[1][None]), strict=False)
    return exported.module(check_guards=False)


def is_attention(node: Node) -> bool:
    """Return whether a node of the graph is the attention of a layer."""
    return node.op == "call_function" and str(node.target).startswith(f"{NAMESPACE}.")


class _Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        found: Tensor = self._model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
        return found


@cache
def _operator() -> Any:
    """Define the operator: causal attention, without windows or sinks, which change none of its tensors."""

    def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        attended = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=True
        )
        return attended.transpose(1, 2).contiguous()

    def shape(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:  # noqa: ARG001 - as the operator
        num_sequences, num_heads, num_tokens, _ = q.shape
        return q.new_empty(num_sequences, num_tokens, num_heads, v.shape[-1])

    operator = torch.library.custom_op(f"{NAMESPACE}::attention", attention, mutates_args=())
    operator.register_fake(shape)
    return operator


def _attend(
    _module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    _mask: object,
    scaling: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attend as transformers asks: q [1, H, T, D], k and v [1, K, T, D]; returns [1, T, H, D]."""
    return _operator()(q, k, v, scaling or q.shape[-1] ** -0.5), None
