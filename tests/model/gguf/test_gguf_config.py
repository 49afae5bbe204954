"""Every option of a GGUF file that changes what a model computes is read, or refused by its name."""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_files import finish
from msgspec import structs

from loong.core.errors import ConfigError
from loong.model.config import ModelConfig, Norms, Scales
from loong.model.families.registry import GGUF_FAMILIES
from loong.model.gguf.keys import NEUTRAL, READ, WITHOUT_EFFECT
from loong.model.rope_config import DefaultRope, LinearRope, YarnRope
from loong.model.shapes import find_config

Add = Callable[[gguf.GGUFWriter], object]
# What llama.cpp reads besides the keys that the package `gguf` names.
OLD_AND_NEW = ("rope.scale_linear", "hidden_activation", "attention.layer_types", "deepstack_mapping")


def config_of(path: Path, *adds: Add, architecture: str = "llama") -> ModelConfig:
    """Return the config of a model with an embedding and no layer, to which `adds` add something."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((7, 64), np.float32))
    for add in adds:
        add(writer)
    finish(writer)
    return find_config(str(path))


def named(cls: type) -> Iterator[str]:
    """Yield the keys of an architecture that the package `gguf` names in a class and those inside of it."""
    for member in vars(cls).values():
        if inspect.isclass(member):
            yield from named(member)
        elif isinstance(member, str) and member.startswith("{arch}."):
            yield member.removeprefix("{arch}.").replace("{dense}", "dense_2")


ALL_NAMES = sorted({*named(gguf.Keys), *OLD_AND_NEW})


def test_the_keys_are_those_of_the_format() -> None:
    assert {*READ, *WITHOUT_EFFECT, *NEUTRAL} <= {*ALL_NAMES}
    assert not READ & WITHOUT_EFFECT
    assert not (READ | WITHOUT_EFFECT) & {*NEUTRAL}


# Each name with one architecture, and each architecture with every seventh name.
@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        (architecture, name)
        for place, (architecture, family) in enumerate(GGUF_FAMILIES.items())
        for name in (ALL_NAMES[place % 7 :: 7] if place else ALL_NAMES)
        if name not in READ | WITHOUT_EFFECT | family.gguf_scales.keys()
    ],
)
def test_what_is_not_read_is_refused_by_name(name: str, architecture: str, tmp_path: Path) -> None:
    key = f"{architecture}.{name}"

    def add(writer: gguf.GGUFWriter) -> None:
        if name in ("attention.causal", "use_parallel_residual", "swin_norm"):
            writer.add_bool(key, name != "attention.causal")
        elif name in ("hidden_activation", "attention.layer_types"):
            writer.add_string(key, "gelu")
        else:
            writer.add_float32(key, 3.0)

    with pytest.raises(ConfigError, match=f"{key} is .*, which is not supported"):
        config_of(tmp_path / "a.gguf", add, architecture=architecture)


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_an_option_that_changes_nothing_is_taken(name: str, tmp_path: Path) -> None:
    plain = config_of(tmp_path / "plain.gguf")
    for number, neutral in enumerate(NEUTRAL[name]):

        def add(writer: gguf.GGUFWriter, neutral: bool | int | float | str = neutral) -> None:
            kind = {bool: "bool", int: "uint32", float: "float32", str: "string"}[type(neutral)]
            getattr(writer, f"add_{kind}")(f"llama.{name}", neutral)

        assert config_of(tmp_path / f"{number}.gguf", add) == plain


def test_options_of_other_models_that_are_off_are_taken(tmp_path: Path) -> None:
    off: list[Add] = [
        lambda writer: writer.add_expert_count(0),
        lambda writer: writer.add_sliding_window(0),
        lambda writer: writer.add_vocab_size(7),
        lambda writer: writer.add_tensor_data_layout("Meta AI original pth"),
        lambda writer: writer.add_uint16("split.count", 1),
    ]
    for architecture in GGUF_FAMILIES:
        plain = config_of(tmp_path / "plain.gguf", architecture=architecture)
        assert config_of(tmp_path / "off.gguf", *off, architecture=architecture) == plain


@pytest.mark.parametrize(("num_layers", "score_width"), [(7, 32), (62, 16)])  # 62: those of 27B
def test_what_files_of_gemma_3_leave_out_is_added(num_layers: int, score_width: int, tmp_path: Path) -> None:
    adds: list[Add] = [
        lambda writer: writer.add_block_count(num_layers),
        lambda writer: writer.add_key_length(32),
        lambda writer: writer.add_value_length(32),
        lambda writer: writer.add_rope_freq_base(1e6),
        lambda writer: writer.add_rope_scaling_factor(8.0),
        lambda writer: writer.add_sliding_window(24),
        lambda writer: writer.add_sliding_window_pattern(6),
    ]
    config = config_of(tmp_path / "a.gguf", *adds, architecture="gemma3")
    assert config.layer_windows[:7] == (24, 24, 24, 24, 24, None, 24)
    assert (config.rope, config.local_rope) == (LinearRope(rope_theta=1e6, factor=8.0), DefaultRope())
    assert config.scales == Scales(embedding=8.0, scores=score_width**-0.5)
    assert config.norms == Norms(is_wide=True, has_outputs=True)
    adds[-1] = lambda writer: writer.add_sliding_window_pattern(3)
    with pytest.raises(ConfigError, match=r"gemma3\.attention\.sliding_window_pattern is 3, which is not"):
        config_of(tmp_path / "b.gguf", *adds, architecture="gemma3")


def test_what_files_of_gpt_oss_leave_out_is_added(tmp_path: Path) -> None:
    adds: list[Add] = [
        lambda writer: writer.add_block_count(3),
        lambda writer: writer.add_sliding_window(24),
        lambda writer: writer.add_expert_count(8),
        lambda writer: writer.add_expert_used_count(4),
        lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN),
        lambda writer: writer.add_rope_scaling_factor(4.0),
        lambda writer: writer.add_rope_scaling_orig_ctx_len(16),
    ]
    config = config_of(tmp_path / "a.gguf", *adds, architecture="gpt-oss")
    assert config.layer_windows == (24, None, 24)
    assert config.has_sinks
    assert config.experts is not None
    assert config.experts.has_bias
    assert config.rope == structs.replace(YARN, beta_fast=32.0, beta_slow=1.0, truncate=False)


def test_other_kinds_of_files_are_refused(tmp_path: Path) -> None:
    for key in ("adapter.type", "clip.projector_type", "diffusion.shift_logits", "xielu.beta"):
        with pytest.raises(ConfigError, match=f"{key} is 'a', which is not supported"):
            config_of(tmp_path / "a.gguf", partial(gguf.GGUFWriter.add_string, key=key, val="a"))
    with pytest.raises(ConfigError, match=r"general\.quantization_version must be 2, got 1"):
        config_of(tmp_path / "a.gguf", lambda writer: writer.add_quantization_version(1))
    with pytest.raises(ConfigError, match=r"a\.gguf is one of 3 files of a split model"):
        config_of(tmp_path / "a.gguf", lambda writer: writer.add_uint16("split.count", 3))


YARN = YarnRope(rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16)


@pytest.mark.parametrize(
    ("adds", "rope"),
    [
        ([lambda w: w.add_rope_scaling_factor(4.0)], LinearRope(factor=4.0)),
        ([lambda w: w.add_float32("llama.rope.scale_linear", 4.0)], LinearRope(factor=4.0)),
        (
            [
                lambda w: w.add_rope_scaling_factor(4.0),
                lambda w: w.add_float32("llama.rope.scale_linear", 2.0),
            ],
            LinearRope(factor=4.0),
        ),
        (
            [
                lambda w: w.add_rope_scaling_factor(4.0),
                lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR),
            ],
            LinearRope(factor=4.0),
        ),
        (
            [
                lambda w: w.add_rope_scaling_factor(4.0),
                lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.NONE),
            ],
            DefaultRope(),
        ),
        (
            [
                lambda w: w.add_rope_scaling_factor(4.0),
                lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN),
                lambda w: w.add_rope_scaling_orig_ctx_len(16),
            ],
            YARN,
        ),
        ([lambda w: w.add_rope_scaling_factor(0.0)], DefaultRope()),
        ([lambda w: w.add_rope_scaling_factor(1.0)], DefaultRope()),
        ([lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)], DefaultRope()),
        ([lambda w: w.add_rope_freq_base(5e5)], DefaultRope(rope_theta=5e5)),
    ],
)
def test_rope_scaling_is_llama_cpps(adds: list[Add], rope: object, tmp_path: Path) -> None:
    assert config_of(tmp_path / "a.gguf", *adds).rope == rope


@pytest.mark.parametrize(
    ("add", "said"),
    [
        (lambda w: w.add_rope_scaling_factor(0.5), r"a\.gguf: rope parameters .* `float` >= 1\.0"),
        (lambda w: w.add_rope_scaling_factor(np.nan), r"scaling\.factor must be a finite number, got nan"),
        (lambda w: w.add_rope_freq_base(np.inf), "freq_base must be a finite number, got inf"),
        (lambda w: w.add_rope_freq_base(0.0), r"a\.gguf: rope parameters .* `float` > 0\.0"),
        (lambda w: w.add_layer_norm_rms_eps(-1.0), "rms_norm_eps must be at least 0, got -1.0"),
        (lambda w: w.add_block_count(10**9), "num_layers must be 1 to 4,096, got 1,000,000,000"),
        (lambda w: w.add_head_count(128), "head_dim must be 1 to 4,096, got 0"),
        (lambda w: w.add_head_count_kv(0), r"attention\.head_count_kv must be above 0, got 0"),
        (lambda w: w.add_uint64("llama.context_length", 2**63), "max_position_embeddings must be 1 to"),
        (
            lambda w: w.add_tensor("rope_freqs.weight", np.ones(4, np.float32)),
            r"rope_freqs\.weight must have shape \[8\], got \[4\]",
        ),
        (
            lambda w: w.add_tensor("rope_freqs.weight", np.zeros(8, np.float32)),
            r"rope_freqs\.weight must have finite factors above 0",
        ),
    ],
)
def test_numbers_that_no_model_has_are_refused(add: Add, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        config_of(tmp_path / "a.gguf", add)


def test_two_scalings_of_one_rope_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight with llama\.rope\.scaling is not supported"):
        config_of(
            tmp_path / "a.gguf",
            lambda writer: writer.add_rope_scaling_factor(4.0),
            lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32)),
        )


def test_factors_of_a_granite_are_read_and_0_is_none(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_embedding_scale(12.0)
        writer.add_attention_scale(0.0)
        writer.add_logit_scale(8.0)
        writer.add_rope_scaling_finetuned(True)

    config = config_of(tmp_path / "a.gguf", add, architecture="granite")
    assert config.scales == Scales(embedding=12.0, logit_divisor=8.0)
    with pytest.raises(ConfigError, match=r"scales.residual must be 1e-09 to 1e"):
        config_of(tmp_path / "b.gguf", lambda writer: writer.add_residual_scale(-1.0), architecture="granite")
    with pytest.raises(ConfigError, match=r"granite.rope.scaling.finetuned is False, which is not supported"):
        config_of(
            tmp_path / "c.gguf",
            lambda writer: writer.add_rope_scaling_finetuned(False),
            architecture="granite",
        )
