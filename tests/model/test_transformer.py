import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from families import FAMILIES, write_tiny_model
from full_attention import FullAttention, OwnQueries
from torch import Tensor
from transformers import AutoModelForCausalLM

from loong.model.hugging_face import load_config
from loong.model.tensor_parallel import Shard, SingleDevice, TensorParallel
from loong.model.transformer import Decoder
from loong.model.weights import load_weights

CPU = torch.device("cpu")
NUM_PROMPT_TOKENS, NUM_TOKENS = 40, 60  # both beyond the original length of the models with scaled rope
TOKENS = torch.randint(97, (NUM_TOKENS,), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="session", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(request.param, tmp_path_factory.mktemp(request.param))


def load(folder: Path, tensor_parallel: TensorParallel) -> Decoder:
    shard = Shard(load_config(folder), tensor_parallel.rank, tensor_parallel.size)
    return Decoder(shard, load_weights(folder, shard, CPU), tensor_parallel)


def run(decoder: Decoder, tokens: Tensor, lengths: list[int], num_prompt_tokens: int) -> Tensor:
    """Return the logits of all tokens, computed in steps of `lengths` tokens."""
    attention = FullAttention(decoder.shard)
    positions = torch.arange(len(tokens))
    sequence_lengths = (positions + 1).clamp(min=num_prompt_tokens)
    hidden = [
        decoder.forward(tokens[step], positions[step], sequence_lengths[step], attention.begin(len(step)))
        for step in torch.split(positions, lengths)
    ]
    return decoder.logits(torch.cat(hidden))


@torch.inference_mode()
def run_transformers(folder: Path, tokens: Tensor, num_prompt_tokens: int) -> Tensor:
    """Return the logits of all tokens as `generate` computes them: the prompt at once, then one by one."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    output = model(tokens[None, :num_prompt_tokens], use_cache=True)
    logits = [output.logits[0]]
    for token in tokens[num_prompt_tokens:]:
        output = model(token[None, None], past_key_values=output.past_key_values, use_cache=True)
        logits.append(output.logits[0])
    return torch.cat(logits)


def one_by_one(num_prompt_tokens: int) -> list[int]:
    return [num_prompt_tokens] + [1] * (NUM_TOKENS - num_prompt_tokens)


def assert_close(logits: Tensor, expected: Tensor) -> None:
    assert expected.std() > 0.3
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_a_layer_begins_without_the_queries_and_attention_of_others(folder: Path) -> None:
    earlier: list[weakref.ref[Tensor]] = []

    class Watched(FullAttention):
        def __call__(self, layer_index: int, q: Tensor, sinks: Tensor | None = None, /) -> Tensor:
            assert not any(tensor() is not None for tensor in earlier)
            out = super().__call__(layer_index, q, sinks)
            earlier.extend((weakref.ref(q), weakref.ref(out)))
            return out

    decoder, positions = load(folder, SingleDevice()), torch.arange(NUM_TOKENS)
    attention = Watched(decoder.shard).begin(NUM_TOKENS)
    decoder.forward(TOKENS, positions, positions + 1, attention)
    assert len(earlier) == 2 * decoder.shard.config.num_layers > 2


@pytest.mark.parametrize("num_prompt_tokens", [8, NUM_PROMPT_TOKENS, NUM_TOKENS])
def test_a_prompt_and_its_continuation_get_the_logits_of_transformers(
    folder: Path, num_prompt_tokens: int
) -> None:
    logits = run(load(folder, SingleDevice()), TOKENS, one_by_one(num_prompt_tokens), num_prompt_tokens)
    assert_close(logits, run_transformers(folder, TOKENS, num_prompt_tokens))


def test_a_step_of_many_rows_computes_each_as_a_step_of_few(folder: Path) -> None:
    decoder = load(folder, SingleDevice())
    tokens, positions = torch.arange(40_000) % 97, torch.arange(40_000) % NUM_TOKENS

    def forward(rows: slice) -> Tensor:
        num_rows = len(tokens[rows])
        lengths = torch.full((num_rows,), NUM_TOKENS)
        return decoder.forward(tokens[rows], positions[rows], lengths, OwnQueries(decoder.shard, num_rows))

    whole = forward(slice(None))
    for first in (0, 16_380, 32_700, 39_990):
        rows = slice(first, first + 10)
        torch.testing.assert_close(whole[rows], forward(rows), atol=1e-4, rtol=1e-4)


def test_how_a_sequence_is_cut_into_steps_does_not_change_its_logits(folder: Path) -> None:
    decoder = load(folder, SingleDevice())
    expected = run(decoder, TOKENS, one_by_one(NUM_PROMPT_TOKENS), NUM_PROMPT_TOKENS)
    for lengths in ([7, 1, 30, 22], [50, 10], [NUM_TOKENS]):
        assert_close(run(decoder, TOKENS, lengths, NUM_PROMPT_TOKENS), expected)


@dataclass(frozen=True)
class ThreadRank:
    """One of several ranks that are threads of this process."""

    rank: int
    slots: list[Tensor]
    barrier: threading.Barrier = field(repr=False)

    @property
    def size(self) -> int:
        return len(self.slots)

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self._exchange(x)).sum(0)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._exchange(x), dim=-1)

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self.slots[self.rank] = x
        self.barrier.wait()
        everything = list(self.slots)
        self.barrier.wait()
        return everything


def on_ranks(size: int, work: Callable[[TensorParallel], Tensor]) -> list[Tensor]:
    slots, barrier = [torch.empty(0)] * size, threading.Barrier(size, timeout=60)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, [ThreadRank(rank, slots, barrier) for rank in range(size)]))


def test_two_ranks_compute_what_one_does_and_agree_to_the_bit(folder: Path) -> None:
    lengths = one_by_one(NUM_PROMPT_TOKENS)
    expected = run(load(folder, SingleDevice()), TOKENS, lengths, NUM_PROMPT_TOKENS)
    first, second = on_ranks(2, lambda ranks: run(load(folder, ranks), TOKENS, lengths, NUM_PROMPT_TOKENS))
    assert_close(first, expected)
    assert torch.equal(first, second)


def test_more_ranks_than_rows_are_left_for_still_work(tmp_path: Path) -> None:
    folder = write_tiny_model("llama-mha", tmp_path, vocab_size=5, eos_token_id=2)
    tokens = TOKENS[:9] % 5
    expected = run(load(folder, SingleDevice()), tokens, [9], 9)
    for logits in on_ranks(4, lambda ranks: run(load(folder, ranks), tokens, [9], 9)):
        assert_close(logits, expected)


def test_a_step_without_tokens_works_and_still_calls_attention(folder: Path) -> None:
    decoder = load(folder, SingleDevice())
    attention = OwnQueries(decoder.shard, 0)
    nothing = torch.empty(0, dtype=torch.int64)
    hidden = decoder.forward(nothing, nothing, nothing, attention)
    assert hidden.shape == (0, 32)
    assert decoder.logits(hidden).shape == (0, 97)
    assert attention.calls == [(0, 0), (1, 0)]
