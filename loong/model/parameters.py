"""The tensors of one rank's decoder, built from a model's named tensors."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from loong.core.errors import ConfigError
from loong.model.config import ModelConfig
from loong.model.device import Device
from loong.model.expert_config import ExpertConfig
from loong.model.expert_weight import DenseExperts, ExpertWeight, Fp8Experts
from loong.model.mlp import MLP, ExpertMLP, GatedMLP
from loong.model.quantization.fp8 import Fp8Matrix, multiplies_fp8, stacked_fp8
from loong.model.quantization.sources import Fp8Source
from loong.model.tensor_parallel import Shard
from loong.model.tensor_shapes import EMBEDDING, LM_HEAD, NORM, expected_shapes
from loong.model.tensor_source import TensorSource
from loong.model.weight import Dense, Embedding, Fp8Linear, Weight, embedding_of, scaled


@dataclass(frozen=True, slots=True)
class LayerParameters:
    """One layer's tensors, of one rank."""

    attention_norm: Tensor  # [E]
    qkv: Weight  # out: this rank's queries, then keys, then values
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    o: Weight  # in: this rank's heads; the bias is on rank 0 alone, so that the sum over ranks has it once
    mlp_norm: Tensor  # [E]
    mlp: MLP  # its last bias is like that of o
    attention_out_norm: Tensor | None = None  # [E], of what attention adds to hidden states
    mlp_out_norm: Tensor | None = None  # [E], of what the MLP adds
    sinks: Tensor | None = None  # [H] float32, of this rank's heads


def normed_out(added: Tensor, norm: Tensor | None, device: Device, eps: float) -> Tensor:
    """Return what is added to hidden states, normed if the model has a norm for it."""
    if norm is None:
        return added
    normed = torch.empty_like(added)
    device.add_rms_norm(added, norm, eps, out=normed, added=None)
    return normed


@dataclass(frozen=True, slots=True)
class Parameters:
    """All tensors of one rank's decoder."""

    embedding: Embedding  # whole on every rank
    layers: tuple[LayerParameters, ...]
    norm: Tensor  # [E]
    lm_head: Weight  # out: this rank's part of the vocab; tied: a view of the embedding

    @torch.inference_mode()
    def load_products(self, device: Device, most_rows: int, most_logits: int) -> None:
        """Load the kernels of `Decoder.forward` for at most `most_rows` tokens, and those of its logits."""
        layer = self.layers[0]
        for part in (layer.qkv, layer.o, layer.mlp):
            part.load_products(device, most_rows)
        self.lm_head.load_products(device, most_logits)


def assemble(
    shard: Shard, source: TensorSource, device: torch.device, *, keeps_fp8: bool | None = None
) -> Parameters:
    """Build one rank's parameters, tensor by tensor, in the model's dtype.

    Weights that the source has in FP8 stay so if the device multiplies them (None), or as `keeps_fp8` says.
    Raises ConfigError naming the first tensor that is missing, unexpected or of the wrong shape, and both
    shapes.
    """
    _check_shapes(shard.config, source.shapes)
    if keeps_fp8 is None:
        keeps_fp8 = multiplies_fp8(device)
    fp8 = source if keeps_fp8 and isinstance(source, Fp8Source) else None
    return _Assembler(shard, source, device, fp8).parameters()


def _check_shapes(config: ModelConfig, found: Mapping[str, tuple[int, ...]]) -> None:
    expected = expected_shapes(config)
    # A tied checkpoint may repeat its embedding, and old ones store tensors that follow from the config.
    optional = {LM_HEAD: (config.vocab_size, config.hidden_size)}
    for name, shape in expected.items():
        if name not in found:
            raise ConfigError(f"the checkpoint lacks tensor {name} of shape {list(shape)}")
    for name, shape in found.items():
        if name.endswith("rotary_emb.inv_freq"):
            continue
        wanted = expected.get(name) or optional.get(name)
        if wanted is None:
            raise ConfigError(f"the checkpoint has an unexpected tensor {name} of shape {list(shape)}")
        if shape != wanted:
            raise ConfigError(f"tensor {name} must have shape {list(wanted)}, got {list(shape)}")


@dataclass(frozen=True, slots=True)
class _Assembler:
    shard: Shard
    source: TensorSource
    device: torch.device
    fp8: Fp8Source | None  # the same source, if its weights in FP8 stay so

    def parameters(self) -> Parameters:
        rows, config = self.shard.vocab_rows, self.shard.config
        table = self._whole(EMBEDDING)
        lm_head = self._stack([(LM_HEAD, rows)]) if LM_HEAD in self.source.shapes else table[rows]
        return Parameters(
            embedding=embedding_of(table, config.scales.embedding),
            layers=tuple(self._layer(index) for index in range(config.num_layers)),
            norm=self._norm(NORM),
            lm_head=scaled(Dense(lm_head, None), 1 / config.scales.logit_divisor),
        )

    def _layer(self, index: int) -> LayerParameters:
        shard, prefix = self.shard, f"model.layers.{index}"
        attention = f"{prefix}.self_attn"
        config, sinks = shard.config, f"{attention}.sinks"
        mlp_norm, out_norms = "post_attention", dict[str, Tensor]()
        if config.norms.has_outputs:  # then the usual name is that of another norm
            out_norms["attention_out_norm"] = self._norm(f"{prefix}.{mlp_norm}_layernorm.weight")
            out_norms["mlp_out_norm"] = self._norm(f"{prefix}.post_feedforward_layernorm.weight")
            mlp_norm = "pre_feedforward"
        q = (f"{attention}.q_proj", shard.q_rows)
        k, v = ((f"{attention}.{letter}_proj", shard.kv_rows) for letter in "kv")
        return LayerParameters(
            attention_norm=self._norm(f"{prefix}.input_layernorm.weight"),
            qkv=self._by_rows([q, k, v]),
            q_norm=self._norm(f"{attention}.q_norm.weight") if config.has_qk_norm else None,
            k_norm=self._norm(f"{attention}.k_norm.weight") if config.has_qk_norm else None,
            o=self._by_columns(f"{attention}.o_proj", shard.q_rows),
            mlp_norm=self._norm(f"{prefix}.{mlp_norm}_layernorm.weight"),
            mlp=self._mlp(f"{prefix}.mlp", config.experts_of(index)),
            sinks=self._whole(sinks)[shard.heads].float() if config.has_sinks else None,
            **out_norms,
        )

    def _mlp(self, prefix: str, experts: ExpertConfig | None) -> MLP:
        if experts is not None:
            return self._expert_mlp(prefix, experts)
        rows = self.shard.mlp_rows
        return GatedMLP(
            gate_up=self._by_rows([(f"{prefix}.{name}_proj", rows) for name in ("gate", "up")]),
            down=self._by_columns(f"{prefix}.down_proj", rows),
            activation=self.shard.config.activation,
        )

    def _expert_mlp(self, prefix: str, experts: ExpertConfig) -> ExpertMLP:
        rows, names = self.shard.expert_rows, [f"{prefix}.experts.{n}" for n in range(experts.num_experts)]
        inputs = [[(f"{name}.{part}_proj.weight", rows) for part in ("gate", "up")] for name in names]
        outputs = [(f"{name}.down_proj.weight", rows) for name in names]
        return ExpertMLP(
            router=Dense(
                self._whole(f"{prefix}.gate.weight"),
                self._whole(f"{prefix}.gate.bias") if experts.has_bias else None,
            ),
            gate_up=self._experts([self._stacked(parts) for parts in inputs]),
            down=self._experts([self._columns(name, columns) for name, columns in outputs]),
            num_chosen=experts.num_chosen,
            is_normalized=experts.is_normalized,
            activation=self.shard.config.activation,
            **self._expert_biases(names, rows) if experts.has_bias else {},
        )

    def _expert_biases(self, names: list[str], rows: slice) -> dict[str, Tensor]:
        """Return this rank's biases of experts."""
        ins = [[(f"{name}.{part}_proj.bias", rows) for part in ("gate", "up")] for name in names]
        biases = {"gate_up_bias": torch.stack([self._stack(parts) for parts in ins])}
        if self.shard.rank == 0:
            biases["down_bias"] = torch.stack([self._whole(f"{name}.down_proj.bias") for name in names])
        return biases

    def _by_rows(self, parts: list[tuple[str, slice]]) -> Weight:
        """Return projections of one input joined into one, with this rank's rows of each."""
        has_bias = f"{parts[0][0]}.bias" in self.source.shapes
        bias = self._stack([(f"{name}.bias", rows) for name, rows in parts]) if has_bias else None
        return self._linear(self._stacked([(f"{name}.weight", rows) for name, rows in parts]), bias)

    def _by_columns(self, name: str, columns: slice) -> Weight:
        """Return a projection of this rank's columns.

        The results are summed over the ranks, and added to hidden states.
        """
        has_bias = f"{name}.bias" in self.source.shapes and self.shard.rank == 0
        bias = self._whole(f"{name}.bias") if has_bias else None
        weight = self._linear(self._columns(f"{name}.weight", columns), bias)
        return scaled(weight, self.shard.config.scales.residual)

    def _linear(self, matrix: Tensor | Fp8Matrix, bias: Tensor | None) -> Weight:
        if isinstance(matrix, Fp8Matrix):
            return Fp8Linear(matrix, bias, self.shard.config.torch_dtype)
        return Dense(matrix, bias)

    def _experts(self, matrices: list[Tensor | Fp8Matrix]) -> ExpertWeight:
        """Return a weight of all experts. All of them are in FP8, or none is."""
        fp8 = [matrix for matrix in matrices if isinstance(matrix, Fp8Matrix)]
        if fp8:
            return Fp8Experts(stacked_fp8(fp8, torch.stack), self.shard.config.torch_dtype)
        return DenseExperts(torch.stack([matrix for matrix in matrices if isinstance(matrix, Tensor)]))

    def _stacked(self, parts: list[tuple[str, slice]]) -> Tensor | Fp8Matrix:
        """Return rows of several weights as one."""
        if self.fp8 is None or not all(self.fp8.is_fp8(name) for name, _ in parts):
            return self._stack(parts)
        matrices = [self.fp8.read_fp8(name, rows).to(self.device) for name, rows in parts]
        return stacked_fp8(matrices, torch.cat)

    def _columns(self, name: str, columns: slice) -> Tensor | Fp8Matrix:
        if self.fp8 is not None and self.fp8.is_fp8(name):
            return self.fp8.read_fp8(name, slice(None), columns).to(self.device)
        return self._place(self.source.read(name, slice(None), columns))

    def _stack(self, parts: list[tuple[str, slice]]) -> Tensor:
        num_rows = sum(rows.stop - rows.start for _, rows in parts)
        _, *row_shape = self.source.shapes[parts[0][0]]
        stacked = self._empty(num_rows, *row_shape)
        start = 0
        for name, rows in parts:
            stop = start + rows.stop - rows.start
            stacked[start:stop].copy_(self.source.read(name, rows))
            start = stop
        return stacked

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.shard.config.torch_dtype, device=self.device)

    def _norm(self, name: str) -> Tensor:
        norms = self.shard.config.norms
        weight = self.source.read(name)
        if not norms.is_wide:
            return self._place(weight)
        return weight.to(device=self.device, dtype=torch.float32) + norms.offset

    def _whole(self, name: str) -> Tensor:
        return self._place(self.source.read(name))

    def _place(self, tensor: Tensor) -> Tensor:
        return tensor.to(device=self.device, dtype=self.shard.config.torch_dtype).contiguous()
