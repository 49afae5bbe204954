"""Captured steps of groups, of prompts and decodes together, give the tokens of transformers."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from bare_instance import Outcome
from bare_worlds import run_commands
from captured_runs import run_by_mailboxes, run_on_gpus
from families import each_kind
from plans import both, decode, prefill
from requests_for_tests import expected, greedy_request, random_prompt

from loong.core.instructions import RunBatch
from loong.core.placement import InstanceId
from loong.core.plan import Transfer
from loong.fabric.traffic import Channel
from loong.state.live_request import LiveRequest

Group = tuple[InstanceId, ...]


class Story:
    """Greedy requests on groups that change, as commands of an engine that knows their tokens."""

    def __init__(self, folder: Path, *lengths: int) -> None:
        self._folder = folder
        self.lives = [LiveRequest(greedy_request(random_prompt(n, seed=n), 9)) for n in lengths]
        self.commands: list[RunBatch] = []

    def step(self, group: Group, masters: Group, num_tokens: int, num_present: int) -> None:
        """A chunk of each of the first prompts, striped, and a token of each request whose prompt is done.

        `masters` are those of prompts; decodes take turns in having each member for a master.
        """
        lives = self.lives[:num_present]
        views = [live.view() for live in lives]
        decodes = [view for view in views if view.is_decoding]
        its_master = {view.request_id: group[i % len(group)] for i, view in enumerate(decodes)}
        prompts = [view for view in views if not view.is_decoding]
        chunks = prefill(prompts, group, num_tokens=num_tokens, masters=masters, transfer=Transfer.QUERY)
        plan = both(chunks, decode(decodes, group, its_master))
        inputs = tuple(live.input_for(plan) for live in lives)
        self.commands.append(RunBatch(1 + len(self.commands), plan, inputs))
        for live in lives:
            tokens, _ = expected(self._folder, live.request.prompt_token_ids, 9)
            live.placement = live.placement.adding(plan.writes_of(live.request.request_id))
            num_known = live.placement.num_tokens - len(live.request.prompt_token_ids) + 1
            live.output_token_ids = tokens[: max(0, num_known)]

    def check(self, by_rank: Sequence[Sequence[Outcome]]) -> None:
        """All tokens came, and were right."""
        reported = [
            token for step in zip(*by_rank, strict=True) for outcome in step for _, token in outcome.tokens
        ]
        for live in self.lives:
            its = [token for token in reported if token.request_id == live.request.request_id]
            tokens, logprobs = expected(self._folder, live.request.prompt_token_ids, 9)
            num_tokens = len(live.output_token_ids)
            assert num_tokens > 0
            assert [token.token_id for token in its] == tokens[:num_tokens]
            chosen = [token.logprobs.chosen for token in its if token.logprobs]
            assert chosen == pytest.approx(logprobs[:num_tokens], abs=1e-4, rel=0)


def a_story(folder: Path) -> Story:
    story = Story(folder, 14, 31, 2, 23)
    story.step((0, 1), (0, 1), 9, 2)
    story.step((1, 0), (1, 0), 9, 2)
    story.step((0, 2, 1), (0, 2), 9, 3)  # a member without a row of prompts, and one without KV
    story.step((2, 0, 1), (1, 2, 0), 16, 4)
    story.step((2, 0, 1), (1, 2, 0), 16, 4)
    story.step((1, 2, 0), (1,), 16, 4)  # decodes alone
    return story


def a_long_story(folder: Path) -> Story:
    """Chunks behind so much history that its keys are copied out of the pool, which gives the first token."""
    story = Story(folder, 14, 1500)
    story.step((0, 1), (0, 1), 900, 2)
    story.step((0, 1), (1, 0), 600, 2)
    story.step((0, 1), (0, 1), 900, 2)
    return story


def test_groups_that_change_between_captured_steps_give_the_tokens_of_transformers(folder: Path) -> None:
    story = a_story(folder)
    by_way = [run_commands(folder, 3, story.commands, takes_leases=way) for way in (False, True)]
    for by_rank in by_way:
        story.check(by_rank)
    launched, captured = by_way
    assert [[o.num_slots_used for o in ours] for ours in captured] == [
        [o.num_slots_used for o in theirs] for theirs in launched
    ]


@each_kind
def test_so_do_those_of_instances_of_two_ranks(folder: Path) -> None:
    story = Story(folder, 14, 31)
    for num_tokens, group in ((9, (0, 1)), (9, (1, 0)), (40, (0, 1)), (40, (0, 1))):
        story.step(group, group, num_tokens, 2)
    by_rank = run_commands(folder, 2, story.commands, takes_leases=True, tp_size=2)
    for tp_rank in range(2):
        story.check(by_rank[tp_rank::2])


def test_so_do_chunks_behind_a_long_history(folder: Path) -> None:
    story = a_long_story(folder)
    story.check(run_commands(folder, 3, story.commands, takes_leases=True, num_slots=2048))


@pytest.mark.multigpu
def test_so_do_those_on_gpus(folder: Path) -> None:
    story = a_story(folder)
    story.check(run_on_gpus(folder, 3, story.commands))


@pytest.mark.multigpu
def test_so_do_chunks_behind_a_long_history_on_gpus(folder: Path) -> None:
    story = a_long_story(folder)
    story.check(run_on_gpus(folder, 3, story.commands, num_slots=2048))


def test_so_do_those_that_exchange_by_mailboxes_and_no_message(folder: Path) -> None:
    story = Story(folder, 7, 12)
    story.step((0, 1), (0, 1), 7, 2)
    story.step((1, 0), (0, 1), 7, 2)
    by_rank = run_by_mailboxes(folder, 2, story.commands)
    story.check(by_rank)
    traffic = [outcome.traffic[Channel.QUERIES] for outcomes in by_rank for outcome in outcomes]
    assert all(sent.messages == 0 for sent in traffic)
