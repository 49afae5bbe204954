from pathlib import Path

import pytest
import torch
from transformers import CohereConfig, GPTNeoXConfig, Qwen3Config

from loong.core.errors import ConfigError
from loong.model.splitting.slices import split
from loong.model.splitting.trace import build, read_config, trace

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
NUM_TOKENS = 5
HIDDEN = 32 * 4  # bytes of a token


@pytest.mark.parametrize(
    ("config", "context"),
    [
        (Qwen3Config(**SIZES, head_dim=16), HIDDEN),
        (GPTNeoXConfig(**SIZES), HIDDEN),  # attention and MLP side by side: their sum goes on
        (CohereConfig(**SIZES), 2 * HIDDEN),  # the MLP is added after attention, so that both are kept
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_slices_compute_what_the_whole_model_does_and_keep_the_least(config: object, context: int) -> None:
    torch.manual_seed(0)
    found = split(trace(build(config, "cpu"), NUM_TOKENS, "cpu"))
    inputs = {
        "input_ids": torch.randint(0, found.vocab_size, (1, NUM_TOKENS)),
        "position_ids": torch.arange(NUM_TOKENS)[None],
    }
    with torch.no_grad():
        assert torch.equal(found.run(inputs), found.graph(*inputs.values()))
    assert found.vocab_size == SIZES["vocab_size"]
    assert [cut.context_bytes for cut in found.cuts] == [NUM_TOKENS * context] * 2
    assert len(found.slices) == 3


def test_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json cannot be read: No such file"):
        read_config(tmp_path)
    file = tmp_path / "config.json"
    for text in ("{", "{}", '{"model_type": "nonsense"}'):
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"is no config\.json that transformers can read"):
            read_config(file)
