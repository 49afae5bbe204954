"""`LLM` gives the tokens of Hugging Face transformers for prompts in every form, and vLLM's outputs."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from loong import LLM, RequestOutput, SamplingParams
from loong.core.errors import ConfigError, EngineStoppedError, InvalidRequestError
from loong.launcher.offline.options import offline_config
from loong.model.tiny import tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
IDS = [list(range(3, 10)), list(range(40, 90)), [7]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), num_instances=2, kv_cache_tokens=512, calibration_time=0) as llm:
        yield llm
    with pytest.raises(EngineStoppedError):
        llm.generate("a")


def token_ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(choice.token_ids) for output in outputs for choice in output.outputs]


def expected(model: Path) -> list[list[int]]:
    """Return the greedy tokens of transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found = []
    for prompt in IDS:
        tokens = torch.tensor([prompt])
        for _ in range(6):
            tokens = torch.cat([tokens, reference(tokens).logits[:, -1].argmax(-1, keepdim=True)], 1)
        found.append(tokens[0, len(prompt) :].tolist())
    return found


def test_prompts_in_every_form_give_the_tokens_of_transformers(llm: LLM, model: Path) -> None:
    forms = (IDS, map(np.array, IDS), ({"prompt_token_ids": tuple(ids)} for ids in IDS))
    for form in forms:
        outputs = llm.generate(form, GREEDY, use_tqdm=False)
        assert token_ids(outputs) == expected(model)
        assert [output.prompt_token_ids for output in outputs] == IDS
        assert {output.outputs[0].finish_reason for output in outputs} == {"length"}


def test_outputs_have_texts_choices_and_log_probabilities(llm: LLM) -> None:
    params = SamplingParams(n=2, temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1)
    (output,) = llm.generate("ring", params, use_tqdm=False)
    first, second = output.outputs
    assert first.token_ids == second.token_ids
    assert first.logprobs is not None
    assert first.cumulative_logprob == pytest.approx(
        sum(found[token].logprob for found, token in zip(first.logprobs, first.token_ids, strict=True))
    )
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    stop = first.text[2]
    (ended,) = llm.generate("ring", SamplingParams(temperature=0, max_tokens=4, stop=stop), use_tqdm=False)
    assert ended.outputs[0].text == first.text[: first.text.index(stop)]
    assert (ended.outputs[0].finish_reason, ended.outputs[0].stop_reason) == ("stop", stop)


def test_a_chat_is_its_prompt_by_the_template(llm: LLM) -> None:
    (answer,) = llm.chat([{"role": "user", "content": "hi"}], GREEDY, use_tqdm=False)
    outputs = llm.generate([answer.prompt_token_ids], [GREEDY], use_tqdm=False)
    assert token_ids(outputs) == token_ids([answer])


@pytest.mark.parametrize(
    ("prompts", "params", "words"),
    [
        (["a", [10**6]], GREEDY, r"prompts\[1\] holds token id 1000000"),
        (["a", 0.5], GREEDY, r"prompts\[1\] must be a text"),
        ([[]], GREEDY, r"prompts\[0\] is empty"),
        ([[7] * 2000], GREEDY, r"prompts\[0\] has 2000 tokens"),
        ("a", SamplingParams(temperature=-1), "temperature must"),
        (["a", "b"], [GREEDY], "2 prompts, but 1 sampling_params"),
    ],
)
def test_what_cannot_be_served_is_named_and_the_rest_goes_on(
    llm: LLM, prompts: object, params: SamplingParams, words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        llm.generate(prompts, params, use_tqdm=False)
    assert llm.generate([IDS[0]], GREEDY, use_tqdm=False)


def test_options_are_those_of_serve_and_unknown_ones_are_named(model: Path) -> None:
    config = offline_config(str(model), {"dtype": "half", "max_model_len": 128, "policy": "replicas"})
    assert (config.model.dtype, config.max_model_len, config.policy_name) == ("float16", 128, "replicas")
    assert config.policy.target_tpot == float("inf")
    for options, words in (
        ({"tensor_paralel_size": 2}, "did you mean tensor_parallel_size"),
        ({"max_num_seqs": 8}, "what fits into KV runs"),
        ({"port": 80}, "there is no option 'port'"),
        ({"kv_cache_tokens": "many"}, "kv-cache-tokens: 'many' is no number"),
    ):
        with pytest.raises(ConfigError, match=words):
            offline_config(str(model), options)


def test_importing_loong_imports_nothing_that_takes_time() -> None:
    program = "import sys, loong; sys.exit(bool({'torch', 'numpy', 'pydantic'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
