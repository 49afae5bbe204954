import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from loong.model.rope import make_rotary
from loong.model.rope_config import DynamicRope, parse_rope

CPU = torch.device("cpu")
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 1024},
        YARN,
        {**YARN, "truncate": False},
        {**YARN, "factor": 1.0},
        {**YARN, "attention_factor": 0.7, "beta_fast": 20.0, "beta_slow": 2.0},
        {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
        {**YARN, "mscale": 0.7, "mscale_all_dim": 0},
        {**YARN, "mscale": 0.0, "mscale_all_dim": 0.7},
        {**YARN, "mscale": 0.7},
        {**YARN, "beta_fast": 0, "beta_slow": 0.0},
        {**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
    ],
)  # fmt: skip
@pytest.mark.parametrize("theta", [10000.0, 5e7])
def test_frequencies_and_magnitude_are_those_of_transformers(
    parameters: dict[str, object], theta: float
) -> None:
    parameters = {**parameters, "rope_theta": theta}
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=4096, rope_parameters=dict(parameters)
    )
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[str(parameters["rope_type"])](config)
    rope = parse_rope(parameters, rope_theta=None, max_position_embeddings=4096)
    rotary = make_rotary(rope, 64, torch.float32, CPU)
    torch.testing.assert_close(rotary.frequencies, frequencies, rtol=1e-5, atol=0)
    assert rotary.magnitude == pytest.approx(magnitude)


def test_cos_and_sin_of_a_million_positions_are_those_of_transformers() -> None:
    parameters = {"rope_type": "default", "rope_theta": 5e7}
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, rope_parameters=dict(parameters))
    positions = torch.tensor([0, 1, 4095, 131071, 1048575])
    expected = LlamaRotaryEmbedding(config)(torch.empty(0, dtype=torch.bfloat16), positions[None])
    rope = parse_rope(parameters, rope_theta=None, max_position_embeddings=1048576)
    found = make_rotary(rope, 64, torch.bfloat16, CPU)(positions, positions + 1)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs[0])


@given(st.integers(1, 30000), st.integers(0, 1000), st.data())
@examples(8, thorough=160)
def test_dynamic_angles_do_not_depend_on_what_is_computed_together(
    num_prompt_tokens: int, num_output_tokens: int, data: st.DataObject
) -> None:
    rope = DynamicRope(factor=4.0, original_max_position_embeddings=64)
    rotary = make_rotary(rope, 16, torch.float32, CPU)
    positions = torch.arange(num_prompt_tokens + num_output_tokens)
    sequence_lengths = (positions + 1).clamp(min=num_prompt_tokens)
    whole = torch.stack(rotary(positions, sequence_lengths))
    chosen = torch.tensor(data.draw(st.lists(st.sampled_from(positions.tolist()), min_size=1, max_size=20)))
    alone = torch.stack(rotary(positions[chosen], sequence_lengths[chosen]))
    torch.testing.assert_close(alone, whole[:, chosen], atol=2e-7, rtol=0)


def test_dynamic_angles_follow_the_length_a_token_was_first_computed_at() -> None:
    rope = DynamicRope(factor=4.0, original_max_position_embeddings=64)
    rotary = make_rotary(rope, 16, torch.float32, CPU)
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    )
    for length in (10, 64, 65, 1000):
        frequencies, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=length)
        cos, _ = rotary(torch.tensor([9]), torch.tensor([length]))
        torch.testing.assert_close(cos[0, :8], (9 * frequencies).cos())


@pytest.mark.parametrize("head_dim", [8, 64])
@pytest.mark.parametrize("parameters", [{"rope_type": "default"}, YARN])
def test_angles_turn_the_usual_scale_of_scores_into_that_of_the_model(
    parameters: dict[str, object], head_dim: int
) -> None:
    rope = parse_rope(parameters, rope_theta=10000.0, max_position_embeddings=1024)
    usual = make_rotary(rope, head_dim, torch.float32, CPU)
    scaled = make_rotary(rope, head_dim, torch.float32, CPU, score_scale=0.3)
    ratio = (scaled.magnitude / usual.magnitude) ** 2
    assert ratio * head_dim**-0.5 == pytest.approx(0.3)
