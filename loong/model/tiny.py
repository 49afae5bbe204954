"""A tiny random model in Hugging Face's format, made at the first use, without a download or a GPU."""

from pathlib import Path

import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from loong.model.config import ModelConfig
from loong.model.made_once import made_once
from loong.model.rope_config import DefaultRope
from loong.model.tensor_shapes import LM_HEAD, expected_shapes

SPECIAL_TOKENS = (
    "<|bos|>", "<|eos|>", "<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>",
)  # fmt: skip
_NUM_BYTES = 256
_NAME = "loong-tiny-v1"  # change it with anything below, because the folder is never made twice
_SEED = 1
_ATTENTION_GAIN = 3.0  # sharp attention, so that outputs depend on the whole prompt
_LOGIT_GAIN = 4.0  # large differences, so that rounding seldom changes the likeliest token

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=_NUM_BYTES + len(SPECIAL_TOKENS),
    hidden_size=64,
    intermediate_size=192,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=131072,
    rope=DefaultRope(rope_theta=1000000.0),
    dtype="float32",
    bos_token_id=_NUM_BYTES,
    eos_token_ids=(_NUM_BYTES + 1, _NUM_BYTES + 3),
)

_CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_model(cache_folder: Path) -> Path:
    """Return the folder of the tiny model under `cache_folder`, made by `made_once`."""
    return made_once(cache_folder / _NAME, _write)


def _write(folder: Path) -> None:
    _write_config(folder)
    _write_weights(folder)
    _write_tokenizer(folder)


def _write_config(folder: Path) -> None:
    config = {
        "architectures": [CONFIG.architecture],
        "model_type": "llama",
        "vocab_size": CONFIG.vocab_size,
        "hidden_size": CONFIG.hidden_size,
        "intermediate_size": CONFIG.intermediate_size,
        "num_hidden_layers": CONFIG.num_layers,
        "num_attention_heads": CONFIG.num_heads,
        "num_key_value_heads": CONFIG.num_kv_heads,
        "head_dim": CONFIG.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": CONFIG.max_position_embeddings,
        "rms_norm_eps": CONFIG.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": CONFIG.rope.rope_theta},
        "tie_word_embeddings": CONFIG.tie_word_embeddings,
        "dtype": CONFIG.dtype,
        "bos_token_id": CONFIG.bos_token_id,
        "eos_token_id": list(CONFIG.eos_token_ids),
    }
    _write_json(folder / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    _write_json(folder / "generation_config.json", ids)


def _write_weights(folder: Path) -> None:
    import torch  # not at the top: processes that only name the model do not need it
    from safetensors.torch import save_file

    from loong.model.weights import RandomTensors

    source = RandomTensors(expected_shapes(CONFIG), _SEED, torch.float32, torch.device("cpu"))
    tensors = {name: source.read(name) for name in source.shapes}
    for name, tensor in tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor.mul_(_ATTENTION_GAIN)
    # Printable text is likely and control characters are not, so the output is safe in a terminal.
    tensors[LM_HEAD].mul_(_LOGIT_GAIN)
    tensors[LM_HEAD][[byte for byte in range(CONFIG.vocab_size) if not 32 <= byte < 127]] *= 0.25
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _write_tokenizer(folder: Path) -> None:
    """Write a tokenizer in which a byte's token id is the byte."""
    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    bos = SPECIAL_TOKENS[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "pad_token": "<|pad|>",
        "chat_template": _CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONFIG.max_position_embeddings,
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _byte_characters() -> list[str]:
    """Return the character of each byte in byte-level tokenizers: the byte itself if it is visible."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(substitutes)) for byte in range(_NUM_BYTES)]


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2))
