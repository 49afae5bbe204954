"""A GGUF file gives the weights, and so the tokens, that its dequantized tensors give transformers."""

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from expert_stacks import of_each_expert
from gguf_files import finish, write_gguf
from leak_checks import shared_cluster
from plans import in_group
from requests_for_tests import assert_exact, greedy_request, random_prompt
from safetensors.torch import load_file

from loong.core.errors import ConfigError
from loong.launcher.cluster.config import ClusterConfig
from loong.model.families.registry import FAMILIES as FAMILIES_BY_NAME
from loong.model.gguf.header import read_header
from loong.model.gguf.tensors import GgufTensors, open_gguf_tensors
from loong.model.hugging_face import load_config
from loong.model.load import load_model
from loong.model.rope_config import Llama3Rope
from loong.model.shapes import find_config
from loong.model.tensor_parallel import SingleDevice
from loong.model.tensor_shapes import expected_shapes
from loong.model.weights import our_name

TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
FAMILIES = (
    "llama", "llama-mha", "llama-tied", "llama-biased", "llama-linear", "llama-yarn",
    "mistral", "mixtral", "qwen2", "qwen3", "qwen3-moe", "granite", "gemma-3", "gpt-oss",
)  # fmt: skip


def tensors_of(path: Path) -> GgufTensors:
    return open_gguf_tensors(read_header(path), find_config(str(path)))


def assert_same_tensors(path: Path, reference: Path) -> None:
    found, wanted = tensors_of(path), of_each_expert(load_file(reference / "model.safetensors"))
    config = load_config(reference)
    assert found.shapes == expected_shapes(find_config(str(path)))
    own_names = FAMILIES_BY_NAME[config.architecture].tensor_names
    for own_name, weight in wanted.items():
        name = our_name(own_name, own_names)
        tensor = weight + (config.norms.offset if name.endswith("norm.weight") else 0.0)
        assert torch.equal(found.read(name), tensor), name
        rows = (slice(1, 3), *[slice(None)] * (tensor.ndim - 1))
        assert torch.equal(found.read(name, *rows), tensor[rows]), name
        if tensor.ndim > 1:
            assert torch.equal(found.read(name, slice(None), slice(5, 40)), tensor[:, 5:40]), name


@pytest.mark.parametrize("quantization", TYPES)
def test_tensors_of_every_type_are_dequantized_whole_and_in_parts(quantization: str, tmp_path: Path) -> None:
    assert_same_tensors(*write_gguf("llama-tied", tmp_path, quantization))


@pytest.mark.parametrize(("family", "quantization"), [("gpt-oss", "MXFP4"), ("qwen3-moe", "Q8_0")])
def test_experts_are_dequantized_too(family: str, quantization: str, tmp_path: Path) -> None:
    assert_same_tensors(*write_gguf(family, tmp_path, quantization))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_tensors_and_the_config_of_its_folder(family: str, tmp_path: Path) -> None:
    path, reference = write_gguf(family, tmp_path)
    assert_same_tensors(path, reference)
    found, wanted = find_config(str(path)), load_config(reference)
    assert found.rms_norm_eps == pytest.approx(wanted.rms_norm_eps)
    norms = replace(found.norms, offset=wanted.norms.offset)  # which weights in GGUF files have
    # All that GGUF knows of Mistral is llama.
    same = replace(found, rms_norm_eps=wanted.rms_norm_eps, architecture=wanted.architecture, norms=norms)
    assert same == replace(wanted, bos_token_id=1, eos_token_ids=(2,))


@pytest.mark.parametrize(
    ("family", "quantization", "sizes"),
    [
        ("llama-tied", "Q4_1", (4, 1)),
        ("llama-biased", "Q8_0", (2, 2)),
        ("qwen3", "F16", (2, 2)),
        ("granite", "Q8_0", (2, 2)),
        ("gemma-3", "Q8_0", (2, 2)),
        ("qwen3-moe", "Q8_0", (2, 2)),
        ("gpt-oss", "MXFP4", (2, 2)),
    ],
)
def test_any_dop_gives_the_tokens_of_transformers(
    family: str, quantization: str, sizes: tuple[int, int], tmp_path: Path
) -> None:
    path, reference = write_gguf(family, tmp_path, quantization)
    config = ClusterConfig(str(path), num_instances=sizes[0], tp_size=sizes[1], kv_capacity=128)
    with shared_cluster(config) as cluster:
        for dop in range(1, len(cluster.full_ids) + 1):
            requests = [greedy_request(random_prompt(30, seed=dop), 8)]
            policy = in_group(*cluster.full_ids[-dop:], chunk=17, num_steps=3)
            assert_exact(reference, requests, cluster.run(requests, policy))


def test_frequency_factors_are_llama_3s_scaling(tmp_path: Path) -> None:
    theta, factor = 500000.0, 8.0
    turns = theta ** (-np.arange(0, 16, 2) / 16) * 8192 / (2 * np.pi)
    kept = np.clip((turns - 1) / 3, 0, 1)
    factors = (1 / (kept + (1 - kept) / factor)).astype(np.float32)

    def write(path: Path, values: np.ndarray) -> str:
        writer = writer_of_nothing(path)
        writer.add_rope_freq_base(theta)
        writer.add_tensor("rope_freqs.weight", values)
        finish(writer)
        return str(path)

    rope = find_config(write(tmp_path / "a.gguf", factors)).rope
    assert rope == Llama3Rope(
        rope_theta=theta,
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight must have the factors of Llama 3"):
        find_config(write(tmp_path / "b.gguf", factors[::-1].copy()))


def writer_of_nothing(path: Path, architecture: str = "llama") -> gguf.GGUFWriter:
    """Return a writer that knows all a config needs, of a model with an embedding and no layer."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((7, 64), np.float32))
    return writer


def refused(writer: gguf.GGUFWriter, path: Path) -> str:
    """Return the error of a file that cannot be loaded."""
    finish(writer)
    with pytest.raises(ConfigError) as caught:
        load_model(str(path), "auto", None, 0, SingleDevice())
    return str(caught.value)


def test_what_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    writer = writer_of_nothing(path, "mamba")
    families = "llama, qwen2, qwen3, qwen3moe, granite, gemma3, gpt-oss"
    assert f"general.architecture must be one of {families}, got 'mamba'" in refused(writer, path)
    writer = writer_of_nothing(path)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    assert "llama.expert_gating_func is 2, which is not supported" in refused(writer, path)
    writer = writer_of_nothing(path)
    writer.add_rope_scaling_attn_factors(0.5)
    assert "llama.rope.scaling.attn_factor is 0.5" in refused(writer, path)
    writer = writer_of_nothing(path)
    writer.add_rope_dimension_count(8)
    assert "llama.rope.dimension_count must be the head dimension, 16, got 8" in refused(writer, path)
    writer = writer_of_nothing(path)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
    assert "llama.rope.scaling.type must be one of none, linear, yarn, got 'longrope'" in refused(
        writer, path
    )
    writer = writer_of_nothing(path)
    writer.add_uint16("split.count", 3)
    assert "one of 3 files of a split model" in refused(writer, path)
    writer = writer_of_nothing(path)
    q8_1 = gguf.GGMLQuantizationType.Q8_1
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((64, 80), np.uint8), raw_dtype=q8_1)
    assert "tensor blk.0.attn_q.weight has type Q8_1, which is not supported" in refused(writer, path)


def test_a_tensor_that_the_file_does_not_hold_is_refused_by_name(tmp_path: Path) -> None:
    path, _ = write_gguf("llama", tmp_path)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ConfigError, match=r"bytes, but its tensor \S+ ends at byte"):
        load_model(str(path), "auto", None, 0, SingleDevice())


@pytest.mark.parametrize("name", ["model.norm.weight", "blk.00.attn_norm.weight", "blk.0.attn_gate.weight"])
def test_tensors_with_other_names_than_llama_cpps_are_refused(name: str, tmp_path: Path) -> None:
    writer = writer_of_nothing(tmp_path / "a.gguf")
    writer.add_tensor(name, np.ones(64, np.float32))
    said = refused(writer, tmp_path / "a.gguf")
    assert f"has an unexpected tensor {name} of shape [64]" in said
