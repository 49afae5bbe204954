"""Prompts are scored some rows of logits at a time, and ranks count in the order of the likeliest."""

from pathlib import Path

import pytest
import torch
from families import write_tiny_model
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from loong.model.load import load_model
from loong.model.tensor_parallel import SingleDevice
from loong.model.transformer import Decoder
from loong.worker.backend import CpuBackend
from loong.worker.sampling.sampler import find_prompt_logprobs
from loong.worker.steps.prompt_scores import LOGITS_AT_ONCE, PendingScores, ScoredRows


class CountingDecoder(Decoder):
    """Keeps how many rows of logits were asked for at a time."""

    counts: list[int]

    @classmethod
    def of(cls, model: Decoder) -> "CountingDecoder":
        counting = cls(model.shard, model.parameters, SingleDevice())
        counting.counts = []
        return counting

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        self.counts.append(len(hidden))
        return super().logits(hidden, out)


def test_no_more_logits_are_in_memory_than_allowed(tmp_path: Path) -> None:
    folder = write_tiny_model("llama-dynamic", tmp_path)
    model = CountingDecoder.of(load_model(str(folder), "auto", None, 0, SingleDevice(), CpuBackend().device))
    config = model.shard.config
    at_once = LOGITS_AT_ONCE // config.vocab_size
    generator = torch.Generator().manual_seed(0)
    num_rows = 2 * at_once + 5
    hidden = torch.randn(num_rows + 7, config.hidden_size, generator=generator)
    token_ids = torch.randint(config.vocab_size, (num_rows,), generator=generator)
    rows = ScoredRows("r", slice(4, 4 + num_rows), range(3, 3 + 2 * num_rows, 2), token_ids.tolist(), 1)
    (found,) = PendingScores([rows], hidden, model, CpuBackend()).results()
    assert model.counts == [at_once, at_once, 5]
    assert found.positions == rows.positions
    for place in (0, at_once - 1, at_once, num_rows - 1):
        logits = model.logits(hidden[4 + place : 5 + place])
        chosen, rank, top_ids, _ = find_prompt_logprobs(logits, token_ids[place : place + 1], 1)
        assert found.chosen[place] == pytest.approx(chosen.item(), abs=1e-5)
        assert (found.ranks[place], found.top_ids[0][place]) == (rank.item(), top_ids.item())


@given(st.integers(0, 2**31), st.integers(1, 40))
def test_the_rank_of_a_token_is_its_place_among_the_likeliest(seed: int, vocab_size: int) -> None:
    """Also among equals, of which there are many."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, vocab_size, generator=generator).round()
    tokens = torch.randint(vocab_size, (3,), generator=generator)
    chosen, ranks, top_ids, top = find_prompt_logprobs(logits, tokens, vocab_size)
    for row, token_id in enumerate(tokens.tolist()):
        place = top_ids[row].tolist().index(token_id)
        assert ranks[row].item() == place + 1
        assert chosen[row] == top[row, place]
