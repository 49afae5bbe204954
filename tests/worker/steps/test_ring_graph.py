"""Captured steps of groups in which KV travels give the tokens of transformers."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from bare_instance import Outcome
from bare_worlds import run_commands
from captured_runs import run_by_mailboxes, run_on_gpus
from families import each_kind
from machines import H200_GRAPH_LIMITS
from plans import prefill
from requests_for_tests import expected, greedy_request, random_prompt

from loong.core.instructions import RunBatch
from loong.core.placement import InstanceId
from loong.fabric.traffic import Channel
from loong.state.live_request import LiveRequest
from loong.worker.steps.ring_inputs import MAX_KV_ROWS

Group = tuple[InstanceId, ...]


class Script:
    """Prompts that are computed in chunks, on groups that change, up to their first tokens."""

    def __init__(self, folder: Path, *lengths: int) -> None:
        self._folder = folder
        self.lives = [LiveRequest(greedy_request(random_prompt(n, seed=n), 1)) for n in lengths]
        self.commands: list[RunBatch] = []

    def chunk(
        self, numbers: Sequence[int], group: Group, masters: Group, keep_on: Group, num_tokens: int
    ) -> None:
        """Add a chunk of each of these prompts, striped over `masters`; their KV stays on `keep_on`."""
        lives = [self.lives[number] for number in numbers]
        views = [live.view() for live in lives]
        plan = prefill(views, group, num_tokens=num_tokens, masters=masters, keep_on=keep_on)
        inputs = tuple(live.input_for(plan) for live in lives)
        self.commands.append(RunBatch(1 + len(self.commands), plan, inputs))
        for live in lives:
            live.placement = live.placement.adding(plan.writes_of(live.request.request_id))

    def check(self, by_rank: Sequence[Sequence[Outcome]]) -> None:
        """Each prompt's first token came once, and was right."""
        reported = [
            (token.request_id, token.token_id)
            for outcomes in by_rank
            for outcome in outcomes
            for _, token in outcome.tokens
        ]
        assert sorted(reported) == sorted(
            (live.request.request_id, expected(self._folder, live.request.prompt_token_ids, 1)[0][0])
            for live in self.lives
        )


def a_script(folder: Path) -> Script:
    script = Script(folder, 14, 31, 2, 23)
    script.chunk((0, 1), (0, 1), (0, 1), (0, 1), 9)
    script.chunk((1,), (1, 2, 0), (2, 0), (1,), 10)  # a member that computes nothing, and keeps all
    script.chunk((0, 1, 2), (1, 0, 2), (1, 0, 2), (0, 2), 40)  # and a prompt shorter than the group
    script.chunk((3,), (2, 1), (1,), (2,), 40)  # the instance that computes keeps nothing
    return script


def a_long_script(folder: Path, num_history: int) -> Script:
    """A last chunk of few rows, behind much history on each of two instances."""
    script = Script(folder, num_history + 11)
    script.chunk((0,), (0, 1), (0, 1), (0, 1), num_history)
    script.chunk((0,), (1, 0), (1, 0), (0, 1), 11)
    return script


def test_groups_that_change_give_the_tokens_of_transformers(folder: Path) -> None:
    script = a_script(folder)
    launched, captured = (run_commands(folder, 3, script.commands, takes_leases=way) for way in (False, True))
    for by_rank in (launched, captured):
        script.check(by_rank)
    assert [[o.num_slots_used for o in ours] for ours in captured] == [
        [o.num_slots_used for o in theirs] for theirs in launched
    ]


@each_kind
def test_so_do_those_of_instances_of_two_ranks(folder: Path) -> None:
    script = Script(folder, 14, 31)
    script.chunk((0, 1), (0, 1), (0, 1), (0, 1), 9)
    script.chunk((0, 1), (1, 0), (1, 0), (0,), 40)
    by_rank = run_commands(folder, 2, script.commands, takes_leases=True, tp_size=2)
    for tp_rank in range(2):
        script.check(by_rank[tp_rank::2])


def test_so_do_those_whose_kv_is_put_into_mailboxes_and_is_in_no_message(folder: Path) -> None:
    script = Script(folder, 7, 12)
    script.chunk((0, 1), (0, 1), (0, 1), (0, 1), 5)
    script.chunk((0,), (1, 2, 0), (2, 0), (1,), 12)  # a member that brings nothing, and keeps all
    script.chunk((1,), (2, 1, 0), (1, 2), (1, 0), 12)
    by_rank = run_by_mailboxes(folder, 3, script.commands)
    script.check(by_rank)
    assert all(o.traffic[Channel.RING].messages == 0 for outcomes in by_rank for o in outcomes)


@pytest.mark.parametrize(
    ("limits", "are_captured"),
    [({"most_kv_rows": 64}, (False, True)), ({"most_gathered": 310}, (True, False))],
    ids=["rows have a limit", "KV of all members has a limit"],
)
def test_history_has_room_apart_from_rows(
    folder: Path, limits: dict[str, int], are_captured: tuple[bool, bool]
) -> None:
    script = a_long_script(folder, 300)
    by_rank = run_by_mailboxes(folder, 2, script.commands, graph_limits=replace(H200_GRAPH_LIMITS, **limits))
    script.check(by_rank)
    for outcomes in by_rank:
        assert tuple(o.traffic[Channel.RING].messages == 0 for o in outcomes) == are_captured


@pytest.mark.multigpu
def test_so_do_those_on_gpus(folder: Path) -> None:
    script = a_script(folder)
    by_rank = run_on_gpus(folder, 3, script.commands)
    script.check(by_rank)
    assert all(o.traffic[Channel.RING].messages == 0 for outcomes in by_rank for o in outcomes)


@pytest.mark.multigpu
def test_few_rows_behind_more_history_than_any_graph_has_rows_are_captured_on_gpus(folder: Path) -> None:
    num_history = 2 * (MAX_KV_ROWS + 100)
    script = a_long_script(folder, num_history)
    by_rank = run_on_gpus(folder, 2, script.commands, num_slots=num_history)
    script.check(by_rank)
    assert [outcomes[1].traffic[Channel.RING].messages for outcomes in by_rank] == [0, 0]
