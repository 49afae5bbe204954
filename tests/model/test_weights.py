import json
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import torch
from families import write_tiny_model
from full_attention import OwnQueries
from safetensors.torch import load_file, save_file
from torch import Tensor

from loong.core.errors import ConfigError
from loong.model.hugging_face import load_config
from loong.model.load import load_model
from loong.model.mlp import MLP, GatedMLP
from loong.model.parameters import Parameters
from loong.model.tensor_parallel import Shard, SingleDevice
from loong.model.tiny import CONFIG
from loong.model.weight import Dense, Weight
from loong.model.weights import dummy_weights, load_weights

CPU = torch.device("cpu")
GATE = "model.layers.1.mlp.gate_proj.weight"
Tensors = dict[str, Tensor]


def load(folder: Path) -> Parameters:
    return load_weights(folder, Shard(load_config(folder)), CPU)


def tensors_of(value: object) -> list[Tensor]:
    """Return every tensor in a tree of dataclasses, in order."""
    match value:
        case Tensor():
            return [value]
        case tuple():
            return [tensor for item in value for tensor in tensors_of(item)]
        case _ if is_dataclass(value):
            return [tensor for field in fields(value) for tensor in tensors_of(getattr(value, field.name))]
        case _:
            return []


def matrix(weight: Weight) -> Tensor:
    assert isinstance(weight, Dense)
    return weight.weight


def mlp_matrices(mlp: MLP) -> tuple[Tensor, Tensor]:
    """Return those of gate and up, and of down."""
    assert isinstance(mlp, GatedMLP)
    return matrix(mlp.gate_up), matrix(mlp.down)


def assert_equal(a: Parameters, b: Parameters) -> None:
    for left, right in zip(tensors_of(a), tensors_of(b), strict=True):
        assert torch.equal(left, right)


def change(tensors: Tensors, name: str, tensor: Tensor | None) -> None:
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (lambda t: change(t, GATE, None), f"lacks tensor {GATE} of shape \\[51, 32\\]"),
        (lambda t: change(t, "lm_head.weight", None), "lacks tensor lm_head.weight"),
        (lambda t: change(t, "extra", torch.ones(3)), r"unexpected tensor extra of shape \[3\]"),
        (
            lambda t: change(t, GATE, torch.ones(32, 51)),
            f"tensor {GATE} must have shape \\[51, 32\\], got \\[32, 51\\]",
        ),
        (
            lambda t: change(t, GATE, torch.ones(51, 32, dtype=torch.int8)),
            f"{GATE} of .* must be one of F64, F32, F16, BF16, got I8",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_its_config_is_refused_by_tensor(
    tmp_path: Path, alter: Callable[[Tensors], None], message: str
) -> None:
    path = write_tiny_model("llama", tmp_path) / "model.safetensors"
    tensors = load_file(path)
    alter(tensors)
    save_file(tensors, path)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


def test_a_tied_checkpoint_may_repeat_its_embedding_and_an_old_one_its_frequencies(tmp_path: Path) -> None:
    path = write_tiny_model("llama-tied", tmp_path) / "model.safetensors"
    tied = load(tmp_path)
    assert matrix(tied.lm_head).data_ptr() == tied.embedding.table.data_ptr()
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, path)
    assert_equal(load(tmp_path), tied)


@pytest.mark.parametrize("num_bytes", [0, 4, 1000, -10])
def test_a_truncated_file_is_one_clear_error(tmp_path: Path, num_bytes: int) -> None:
    path = write_tiny_model("llama", tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(ConfigError, match=r"cannot read .*model.safetensors: "):
        load(tmp_path)


def test_a_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    (write_tiny_model("llama", tmp_path) / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"must contain model.safetensors or model.safetensors.index.json"):
        load(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(ConfigError, match=r"cannot read .*gone.safetensors"):
        load(tmp_path)
    index.write_text("{")
    with pytest.raises(ConfigError, match=r"cannot read .*index.json"):
        load(tmp_path)


def test_sharded_files_hold_the_same_model(tmp_path: Path) -> None:
    path = write_tiny_model("llama-biased", tmp_path) / "model.safetensors"
    whole = load(tmp_path)
    tensors = load_file(path)
    path.unlink()
    weight_map = {name: f"part-{index % 3}.safetensors" for index, name in enumerate(tensors)}
    for part in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == part}, tmp_path / part)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_equal(load(tmp_path), whole)


def test_weights_take_the_dtype_of_the_config(tmp_path: Path) -> None:
    folder = write_tiny_model("llama", tmp_path)
    decoder = load_model(str(folder), "auto", "bfloat16", 0, SingleDevice())
    expected = [tensor.bfloat16() for tensor in tensors_of(load(folder))]
    for found, wanted in zip(tensors_of(decoder.parameters), expected, strict=True):
        assert torch.equal(found, wanted)


def test_dummy_weights_of_any_number_of_ranks_are_parts_of_one_model() -> None:
    whole = dummy_weights(Shard(CONFIG), CPU, seed=3)
    parts = [dummy_weights(Shard(CONFIG, rank, 2), CPU, seed=3) for rank in range(2)]
    assert torch.equal(torch.cat([matrix(part.lm_head) for part in parts]), matrix(whole.lm_head))
    for index, layer in enumerate(whole.layers):
        ranks = [part.layers[index] for part in parts]
        assert torch.equal(torch.cat([matrix(rank.o) for rank in ranks], dim=1), matrix(layer.o))
        gate_ups, downs = zip(*(mlp_matrices(rank.mlp) for rank in ranks), strict=True)
        gate_up, down = mlp_matrices(layer.mlp)
        assert torch.equal(torch.cat(downs, dim=1), down)
        assert torch.equal(torch.cat([each.chunk(2)[0] for each in gate_ups]), gate_up.chunk(2)[0])


def test_dummy_weights_follow_their_seed_alone() -> None:
    first, again, other = (dummy_weights(Shard(CONFIG), CPU, seed=seed) for seed in (3, 3, 4))
    assert_equal(first, again)
    assert not torch.equal(first.embedding.table, other.embedding.table)
    assert not torch.equal(matrix(first.layers[0].o), matrix(first.layers[1].o))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_dummy_model_has_activations_of_ordinary_size(tmp_path: Path, dtype: str) -> None:
    decoder = load_model(str(write_tiny_model("qwen3", tmp_path)), "dummy", dtype, 0, SingleDevice())
    tokens = torch.arange(9)
    attention = OwnQueries(decoder.shard, len(tokens))
    hidden = decoder.forward(tokens, tokens, tokens + 1, attention)
    assert hidden.dtype == decoder.shard.config.torch_dtype
    assert 0.5 < float(decoder.logits(hidden).std()) < 2


def test_one_file_goes_before_an_index_as_in_transformers(tmp_path: Path) -> None:
    write_tiny_model("llama", tmp_path)
    wanted = load(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    assert_equal(load(tmp_path), wanted)


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_names_without_their_prefix_are_those_of_the_same_tensors(family: str, tmp_path: Path) -> None:
    path = write_tiny_model(family, tmp_path) / "model.safetensors"
    wanted, tensors = load(tmp_path), load_file(path)
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, path)
    assert_equal(load(tmp_path), wanted)
    save_file({**tensors, "norm.weight": torch.ones(32)}, path)
    with pytest.raises(ConfigError, match=r"has norm\.weight, but model\.norm\.weight is in .*, too"):
        load(tmp_path)
