import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import FAMILIES, write_tiny_model

from loong.core.errors import ConfigError
from loong.model.config import ModelConfig
from loong.model.hugging_face import OPTIONS_OF_OTHERS, load_config
from loong.model.rope_config import DefaultRope, DynamicRope, LinearRope, Llama3Rope, YarnRope
from loong.model.shapes import SHAPES, find_config

LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}

GRANITE: dict[str, object] = {"architectures": ["GraniteForCausalLM"]}


def read(folder: Path, **changes: object) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return load_config(folder)


def test_what_older_configs_leave_out_has_the_defaults_of_transformers(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert (config.num_kv_heads, config.head_dim, config.dtype) == (4, 8, "bfloat16")
    assert config.torch_dtype == torch.bfloat16
    assert config.rope == DefaultRope(rope_theta=10000.0)
    switches = (config.has_qkv_bias, config.has_o_bias, config.has_mlp_bias, config.has_qk_norm)
    assert switches == (False, False, False, False)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_writes_can_be_read(family: str, tmp_path: Path) -> None:
    config = load_config(write_tiny_model(family, tmp_path))
    assert (config.vocab_size, config.num_layers, config.dtype) == (97, 2, "float32")
    assert config.eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("scaling", "rope"),
    [
        (None, DefaultRope(rope_theta=5e6)),
        ({"type": "linear", "factor": 2}, LinearRope(rope_theta=5e6, factor=2.0)),
        (
            {"type": "dynamic", "factor": 2.0},
            DynamicRope(rope_theta=5e6, factor=2.0, original_max_position_embeddings=4096),
        ),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": 512},
            Llama3Rope(
                rope_theta=5e6, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                original_max_position_embeddings=512,
            ),
        ),
        (
            {"type": "yarn", "original_max_position_embeddings": 1024},
            YarnRope(rope_theta=5e6, factor=4.0, original_max_position_embeddings=1024),
        ),
    ],
)  # fmt: skip
def test_the_older_and_the_newer_layout_of_rope_mean_the_same(
    tmp_path: Path, scaling: dict[str, object] | None, rope: object
) -> None:
    assert read(tmp_path, rope_theta=5e6, rope_scaling=scaling).rope == rope
    assert read(tmp_path, rope_parameters={**(scaling or {}), "rope_theta": 5e6}).rope == rope


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            r"architectures must start with one of Llama.*got \['GPT2LMHead",
        ),
        ({"architectures": None}, "architectures must start with one of .* got None"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quant_method 'hqq' is not supported, only comp"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', 'swish', got 'gelu'"),
        ({"model_type": "mistral"}, "model_type of LlamaForCausalLM must be 'llama', got 'mistral'"),
        ({"model_type": "granite"}, "model_type of LlamaForCausalLM must be 'llama', got 'granite'"),
        ({"layer_types": ["linear_attention"] * 2}, "layer_types must be full_attention, got 'linear_"),
        ({"layer_types": ["full_attention"]}, "layer_types must name 2 layers, got 1"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window must be at least 1"),
        ({"num_hidden_layers": 10**9}, "num_layers must be 1 to 4,096, got 1,000,000,000"),
        ({"vocab_size": 10**12}, "vocab_size must be 1 to 16,777,216, got 1,000,000,000,000"),
        ({**GRANITE, "logits_scaling": 0.0}, "scales.logit_divisor must be 1e-09 to .*, got 0"),
        ({**GRANITE, "attention_multiplier": -1.0}, "scales.scores must be 1e-09 to .*, got -1"),
        ({**GRANITE, "embedding_multiplier": 1e10}, r"scales.embedding must be .* to 1e\+09, got 1e\+10"),
        ({**GRANITE, "model_type": "llama"}, "model_type of GraniteForCausalLM must be 'granite', got"),
        ({"num_attention_heads": 64}, "head_dim must be 1 to 4,096, got 0"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps must be at least 0"),
        ({"rope_theta": 0.0}, r"`float` > 0.0 - at `\$.rope_theta`"),
        ({"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "head_dim must be above 2"),
        ({"hidden_size": "32"}, r"Expected `int`, got `str` - at `\$.hidden_size`"),
        ({"vocab_size": 0}, r"Expected `int` >= 1 - at `\$.vocab_size`"),
        ({"num_key_value_heads": 3}, "num_heads must be a multiple of num_kv_heads, got 4 and 3"),
        ({"head_dim": 7}, "head_dim must be even for rotary embedding, got 7"),
        ({"torch_dtype": "int8"}, "dtype must be one of float32, float16, bfloat16, got 'int8'"),
        (
            {"rope_scaling": {"type": "longrope"}},
            "rope_type must be one of default, linear, .* got 'longrope'",
        ),
        ({"rope_scaling": {"type": "linear"}}, "missing required field `factor`"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, r">= 1.0 - at `\$.factor`"),
        ({"rope_scaling": {"type": "default", "mrope_section": [1]}}, "unknown field `mrope_section`"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1.0, got 0.5"),
        (
            {
                "rope_scaling": {
                    "type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 4.0,
                }
            },
            "high_freq_factor must be above low_freq_factor=4.0, got 4.0",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, **changes)


@pytest.mark.parametrize("name", sorted(OPTIONS_OF_OTHERS))
def test_options_of_other_models_are_refused_unless_they_change_nothing(name: str, tmp_path: Path) -> None:
    plain = read(tmp_path)
    for neutral in (None, *OPTIONS_OF_OTHERS[name]):
        assert read(tmp_path, **{name: neutral}) == plain
    for value in (0.25, "gelu", [1]):
        with pytest.raises(ConfigError, match=rf"config\.json: {name} must be"):
            read(tmp_path, **{name: value})


def test_a_window_that_is_off_may_have_any_size(tmp_path: Path) -> None:
    off = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False}
    assert read(tmp_path, **off, sliding_window=0).sliding_window is None


def test_an_id_of_no_token_ends_nothing(tmp_path: Path) -> None:
    assert read(tmp_path, eos_token_id=-1).eos_token_ids == ()


def test_a_file_that_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*config.json: No such file"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": [')
    with pytest.raises(ConfigError, match=r"config.json: Input data was truncated"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "a": ' + "[" * 100_000)
    with pytest.raises(ConfigError, match=r"config.json: maximum recursion depth exceeded"):
        load_config(tmp_path)


def test_the_generation_config_knows_the_end_of_sequence_ids_better(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert read(tmp_path).eos_token_ids == (2, 7)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    assert read(tmp_path).eos_token_ids == (2,)


def test_a_mistrals_window_is_of_every_layer_and_does_not_bound_the_length(tmp_path: Path) -> None:
    config = read(tmp_path, architectures=["MistralForCausalLM"], sliding_window=1024)
    assert config.kv_layout().layer_windows == (1024, 1024)
    assert config.max_length == 4096


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"use_sliding_window": False}, ()),
        ({"use_sliding_window": True, "max_window_layers": 2}, ()),
        ({"use_sliding_window": True, "max_window_layers": 1}, (None, 1024)),
        ({"use_sliding_window": True, "max_window_layers": 0}, (1024, 1024)),
        ({"use_sliding_window": True, "layer_types": ["full_attention", "full_attention"]}, ()),
        ({"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}, (1024, None)),
    ],
)
def test_qwen_switches_its_window_on_by_layer(
    tmp_path: Path, changes: dict[str, object], windows: tuple[int | None, ...]
) -> None:
    config = read(tmp_path, architectures=["Qwen2ForCausalLM"], sliding_window=1024, **changes)
    assert config.kv_layout().layer_windows == windows


def test_scaled_rope_lengthens_what_a_model_was_made_for(tmp_path: Path) -> None:
    assert read(tmp_path, rope_scaling={"type": "linear", "factor": 2.0}).max_length == 8192
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    assert read(tmp_path, rope_scaling=yarn).max_length == 16384
    assert SHAPES["llama-3.1-8b"].max_length == 131072


def test_kv_bytes_per_token_are_those_of_all_layers_and_heads() -> None:
    assert SHAPES["llama-3.1-8b"].kv_layout().bytes_per_token == 128 * 1024
    for name in ("llama-2-7b", "lwm-1m"):
        assert SHAPES[name].kv_layout().bytes_per_token == 512 * 1024


def test_a_model_is_found_by_folder_or_as_dummy_by_name(tmp_path: Path) -> None:
    assert find_config("lwm-1m", "dummy", "float16").dtype == "float16"
    assert find_config(str(write_tiny_model("llama", tmp_path))).hidden_size == 32
    with pytest.raises(ConfigError, match="lwm-1m is a built-in shape without weights; --load-format dummy"):
        find_config("lwm-1m")
    with pytest.raises(
        ConfigError, match="no-model' does not exist; name a local folder, a GGUF file or, with --load"
    ):
        find_config(str(tmp_path / "no-model"))
    with pytest.raises(
        ConfigError, match="org/Model' does not exist; name a local folder, a GGUF file or one of llama"
    ):
        find_config("org/Model", "dummy")
    with pytest.raises(ConfigError, match="load format must be one of auto, safetensors, dummy, got 'gguf'"):
        find_config("lwm-1m", "gguf")
    with pytest.raises(ConfigError, match=r"dtype must be one of .* got 'int8'"):
        find_config("lwm-1m", "dummy", "int8")


def test_reading_a_config_does_not_import_torch() -> None:
    program = "import sys, loong.model.shapes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
