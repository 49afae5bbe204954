"""Shapes of well-known models, for serving dummy weights without any file."""

from dataclasses import replace
from pathlib import Path

from loong.core.activation import Activation
from loong.core.errors import ConfigError
from loong.core.kv_layout import KV_CACHE_DTYPES
from loong.model.config import ModelConfig, Norms, Scales
from loong.model.expert_config import ExpertConfig
from loong.model.hugging_face import load_config
from loong.model.quantization.config import AT_LOAD, FLAG_VALUES, Method
from loong.model.rope_config import DefaultRope, LinearRope, Llama3Rope, YarnRope

_LLAMA_2_7B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    max_position_embeddings=4096,
    rope=DefaultRope(),
    dtype="bfloat16",
    bos_token_id=1,
    eos_token_ids=(2,),
)

_LLAMA_3_1_ROPE = Llama3Rope(
    rope_theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)

_LLAMA_3_1_8B = replace(
    _LLAMA_2_7B,
    vocab_size=128256,
    intermediate_size=14336,
    num_kv_heads=8,
    max_position_embeddings=131072,
    rope=_LLAMA_3_1_ROPE,
    bos_token_id=128000,
    eos_token_ids=(128001, 128008, 128009),
)

SHAPES = {
    "llama-2-7b": _LLAMA_2_7B,
    "lwm-1m": replace(_LLAMA_2_7B, max_position_embeddings=1048576, rope=DefaultRope(rope_theta=50000000.0)),
    "llama-3.1-8b": _LLAMA_3_1_8B,
    "llama-3.1-70b": replace(
        _LLAMA_3_1_8B, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64
    ),
    "llama-3.2-1b": replace(
        _LLAMA_3_1_8B,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        head_dim=64,
        rope=Llama3Rope(
            rope_theta=500000.0,
            factor=32.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
        tie_word_embeddings=True,
    ),
    "qwen3-8b": ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rope=DefaultRope(rope_theta=1000000.0),
        dtype="bfloat16",
        rms_norm_eps=1e-6,
        has_qk_norm=True,
        eos_token_ids=(151645, 151643),
    ),
}
SHAPES["qwen3-30b-a3b"] = replace(
    SHAPES["qwen3-8b"],
    architecture="Qwen3MoeForCausalLM",
    hidden_size=2048,
    intermediate_size=6144,
    num_layers=48,
    num_kv_heads=4,
    experts=ExpertConfig(num_experts=128, num_chosen=8, intermediate_size=768),
)
SHAPES["mixtral-8x7b"] = replace(
    _LLAMA_2_7B,
    architecture="MixtralForCausalLM",
    intermediate_size=14336,
    num_kv_heads=8,
    max_position_embeddings=32768,
    rope=DefaultRope(rope_theta=1000000.0),
    experts=ExpertConfig(num_experts=8, num_chosen=2, intermediate_size=14336),
)

SHAPES["gemma-3-1b"] = ModelConfig(
    architecture="Gemma3ForCausalLM",
    vocab_size=262144,
    hidden_size=1152,
    intermediate_size=6912,
    num_layers=26,
    num_heads=4,
    num_kv_heads=1,
    head_dim=256,
    max_position_embeddings=32768,
    rope=DefaultRope(rope_theta=1000000.0),
    local_rope=DefaultRope(),
    dtype="bfloat16",
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    has_qk_norm=True,
    norms=Norms(offset=1.0, is_wide=True, has_outputs=True),
    activation=Activation.GELU_TANH,
    scales=Scales(embedding=1152**0.5),
    sliding_window=512,
    full_layers=frozenset(range(5, 26, 6)),
    eos_token_ids=(1, 106),
)
SHAPES["gpt-oss-20b"] = ModelConfig(
    architecture="GptOssForCausalLM",
    vocab_size=201088,
    hidden_size=2880,
    intermediate_size=2880,
    num_layers=24,
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    max_position_embeddings=131072,
    rope=YarnRope(rope_theta=150000.0, factor=32.0, original_max_position_embeddings=4096, truncate=False),
    dtype="bfloat16",
    has_qkv_bias=True,
    has_o_bias=True,
    has_sinks=True,
    norms=Norms(is_wide=True),
    activation=Activation.CLAMPED_SWIGLU,
    experts=ExpertConfig(
        num_experts=32, num_chosen=4, intermediate_size=2880, has_bias=True, is_stacked=True
    ),
    sliding_window=128,
    full_layers=frozenset(range(1, 24, 2)),
    eos_token_ids=(200002, 199999, 200012),
)
SHAPES["gemma-3-27b"] = replace(
    SHAPES["gemma-3-1b"],
    vocab_size=262208,
    hidden_size=5376,
    intermediate_size=21504,
    num_layers=62,
    num_heads=32,
    num_kv_heads=16,
    head_dim=128,
    max_position_embeddings=131072,
    rope=LinearRope(rope_theta=1000000.0, factor=8.0),
    scales=Scales(embedding=5376**0.5, scores=168**-0.5),
    sliding_window=1024,
    full_layers=frozenset(range(5, 62, 6)),
)
SHAPES["gpt-oss-120b"] = replace(
    SHAPES["gpt-oss-20b"],
    num_layers=36,
    experts=ExpertConfig(
        num_experts=128, num_chosen=4, intermediate_size=2880, has_bias=True, is_stacked=True
    ),
    full_layers=frozenset(range(1, 36, 2)),
)

LOAD_FORMATS = ("auto", "safetensors", "dummy")  # the first two are equal: the file or folder decides


def find_config(
    model: str,
    load_format: str = "auto",
    dtype: str | None = None,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
) -> ModelConfig:
    """Return the config of a local folder or GGUF file, or of a name in SHAPES with `load_format="dummy"`.

    `dtype` replaces the model's own, `quantization` is one of FLAG_VALUES, `kv_cache_dtype` one of
    KV_CACHE_DTYPES. Raises ConfigError naming the alternatives.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"load format must be one of {', '.join(LOAD_FORMATS)}, got {load_format!r}")
    path = Path(model)
    if load_format == "dummy" and model in SHAPES:
        config = SHAPES[model]
    elif path.is_dir():
        config = load_config(path)
    elif path.is_file():
        from loong.model.gguf.config import (
            gguf_config,
        )  # not at the top: other models do not need its imports
        from loong.model.gguf.header import read_header

        config = gguf_config(read_header(path))
    elif model in SHAPES:
        raise ConfigError(
            f"model {model} is a built-in shape without weights; --load-format dummy makes random ones"
        )
    else:
        shapes = f"one of {', '.join(SHAPES)}"
        others = f" or {shapes}" if load_format == "dummy" else f" or, with --load-format dummy, {shapes}"
        raise ConfigError(f"model {model!r} does not exist; name a local folder, a GGUF file{others}")
    config = config if dtype is None else replace(config, dtype=dtype)
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ConfigError(
            f"--kv-cache-dtype must be one of {', '.join(KV_CACHE_DTYPES)}, got {kv_cache_dtype!r}"
        )
    config = replace(config, has_fp8_kv=kv_cache_dtype == "fp8")
    return config if quantization is None else _quantized(config, quantization)


def _quantized(config: ModelConfig, quantization: str) -> ModelConfig:
    """Return a config with weights of FP8, made when they are loaded if they are not stored so."""
    if quantization not in FLAG_VALUES:
        raise ConfigError(f"--quantization must be one of {', '.join(FLAG_VALUES)}, got {quantization!r}")
    if config.quantization is None:
        return replace(config, quantization=AT_LOAD)
    if config.quantization.method is not Method.FP8:
        raise ConfigError(
            f"--quantization {quantization} is for other weights than those of {config.quantization}"
        )
    return config
