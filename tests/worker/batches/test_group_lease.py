"""Leases of groups whose steps do not wait for the host give the tokens of those that do."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from bare_instance import Outcome, Stop
from bare_worlds import run_commands
from families import each_kind
from group_leases import NUM_TOKENS, PROMPTS, Lease, LeaseScript
from requests_for_tests import expected

from loong.core.events import ProducedToken
from loong.core.request import FinishReason
from loong.fabric.traffic import Channel


def reported(outcomes: Sequence[Outcome]) -> list[list[tuple[int, ProducedToken]]]:
    return [
        sorted(outcome.tokens, key=lambda reported: (reported[0], reported[1].request_id))
        for outcome in outcomes
    ]


@each_kind
def test_any_groups_one_after_the_other_give_the_tokens_of_transformers(folder: Path) -> None:
    """A group grows, changes its order and its masters, and has members with no KV or that are no masters."""
    script = LeaseScript(folder, (0, 1), [NUM_TOKENS] * 4)
    leases = [
        Lease((1, 0), (0, 1, 0, 0), 4),
        Lease((1, 3, 0), (0, 1, 0, 0), 2),
        Lease((0, 2, 1), (2, 2, 2, 2), 3),
        Lease((3, 1, 0, 2), (1, 3, 0, 3), 5),
    ]
    for lease in leases:
        script.lease(lease)
    waiting, not_waiting = (
        run_commands(folder, 4, script.commands, takes_leases=way) for way in (False, True)
    )
    for ours, theirs in zip(not_waiting, waiting, strict=True):
        assert reported(ours) == reported(theirs)
        assert [o.num_steps for o in ours] == [o.num_steps for o in theirs]
        assert [o.num_slots_used for o in ours] == [o.num_slots_used for o in theirs]
    for live in script.lives:
        name, tokens = live.request.request_id, live.output_token_ids
        produced = [
            t.token_id
            for o in zip(*not_waiting, strict=True)
            for p in o
            for _, t in p.tokens
            if t.request_id == name
        ]
        assert produced == tokens
    edges = [outcome.traffic[Channel.CONTROL].messages for outcome in not_waiting[0][1:]]
    assert edges == [(lease.num_steps - 1) * (len(lease.group) - 1) for lease in leases]  # none at the last


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.5, "frequency_penalty": 0.4},
        {"num_logprobs": 2, "logit_bias": ((5, 9.0),), "min_tokens": 7, "stop_token_ids": (5, 6)},
        {"temperature": 0.8, "presence_penalty": 1.0, "seed": 3},
        {"allowed_token_ids": (5, 6, 7, 8), "bad_words": ((5, 6), (7, 7), (6, 8, 6), (8,)), "seed": 3},
    ],
    ids=str,
)
def test_groups_give_what_requests_ask_for(folder: Path, params: Mapping[str, object]) -> None:
    """The lease continues with the greedy tokens, also after other ones were drawn."""
    script = LeaseScript(folder, (0, 1), [NUM_TOKENS] * 4, params)
    script.lease(Lease((1, 3, 0), (0, 1, 0, 3), 6))
    script.lease(Lease((0, 1, 2, 3), (2, 2, 2, 2), 3))
    waiting, not_waiting = (
        run_commands(folder, 4, script.commands, takes_leases=way) for way in (False, True)
    )
    for ours, theirs in zip(not_waiting, waiting, strict=True):
        assert reported(without_logprobs(ours)) == reported(without_logprobs(theirs))


def without_logprobs(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """A lease computes padded rows, so its numbers are a little different."""
    return [
        replace(
            outcome, tokens=tuple((step, token._replace(logprobs=None)) for step, token in outcome.tokens)
        )
        for outcome in outcomes
    ]


@pytest.mark.parametrize(
    ("stop", "num_steps"),
    [
        (Stop(1), 2),  # the second step had begun
        (Stop(4), 4),
        (Stop(2, reported_in=5), 6),
        (Stop(7, reported_in=3), 7),
        (Stop(12), 8),  # all requests are over before
        (None, 8),
        (Stop(30, reported_in=2), 8),
    ],
)
def test_all_members_end_at_one_step_which_the_leader_names_or_nobody_is_left(
    folder: Path, stop: Stop | None, num_steps: int
) -> None:
    script = LeaseScript(folder, (0, 1, 2), (4, 9, 6))
    script.lease(Lease((2, 0, 1), (0, 1, 2), 13))
    stops = {0: Stop(1), 1: Stop(1)}  # they are not asked
    by_rank = run_commands(
        folder, 3, script.commands, stops if stop is None else {**stops, 2: stop}, takes_leases=True
    )
    assert [outcomes[1].num_steps for outcomes in by_rank] == [num_steps] * 3
    for live, (_, outcome) in zip(script.lives, by_rank, strict=True):
        tokens, _ = expected(folder, live.request.prompt_token_ids, NUM_TOKENS)
        last = min(num_steps, live.request.sampling_params.max_tokens - 1)
        assert [(step, token.token_id) for step, token in outcome.tokens] == list(
            enumerate(tokens[1 : 1 + last])
        )
        is_over = last == live.request.sampling_params.max_tokens - 1
        assert (outcome.tokens[-1][1].finish_reason is FinishReason.LENGTH) == is_over


@pytest.mark.parametrize("stop", [Stop(16), Stop(11, reported_in=3), Stop(90, reported_in=5)], ids=str)
def test_a_lease_goes_on_as_long_as_the_leader_says_if_it_hears_of_it_before_the_last_step(
    folder: Path, stop: Stop
) -> None:
    script = LeaseScript(folder, (0, 1, 2), (NUM_TOKENS, 9, NUM_TOKENS))
    script.lease(Lease((2, 0, 1), (0, 1, 2), 7))
    stops = {0: Stop(1), 1: Stop(1), 2: stop}  # the leader is asked alone
    waiting, not_waiting = (
        run_commands(folder, 3, script.commands, stops, takes_leases=way) for way in (False, True)
    )
    num_steps = min(stop.step, NUM_TOKENS - 1)
    for ours, theirs in zip(not_waiting, waiting, strict=True):
        assert reported(ours) == reported(theirs)
        assert ours[1].num_steps == theirs[1].num_steps == num_steps
    for live, (_, outcome) in zip(script.lives, not_waiting, strict=True):
        tokens, _ = expected(folder, live.request.prompt_token_ids, NUM_TOKENS)
        last = min(num_steps, live.request.sampling_params.max_tokens - 1)
        assert [token.token_id for _, token in outcome.tokens] == tokens[1 : 1 + last]


def test_a_lease_that_hears_in_its_last_step_that_it_may_go_on_ends(folder: Path) -> None:
    script = LeaseScript(folder, (0, 1), (NUM_TOKENS, NUM_TOKENS))
    script.lease(Lease((0, 1), (0, 1), 7))
    by_rank = run_commands(folder, 2, script.commands, {0: Stop(15, reported_in=7)}, takes_leases=True)
    assert [outcomes[1].num_steps for outcomes in by_rank] == [7, 7]
    assert [outcomes[1].num_slots_used - outcomes[0].num_slots_used for outcomes in by_rank] == [7, 7]


def test_a_request_that_ends_by_a_token_ends_its_part_of_the_lease(folder: Path) -> None:
    tokens, _ = expected(folder, PROMPTS[0], NUM_TOKENS)
    script = LeaseScript(folder, (0, 1), (NUM_TOKENS,), {"stop_token_ids": (tokens[3],)})
    script.lease(Lease((0, 1), (1,), 9))
    by_rank = run_commands(folder, 2, script.commands, takes_leases=True)
    num_steps = tokens.index(tokens[3])
    assert [outcomes[1].num_steps for outcomes in by_rank] == [num_steps] * 2
    assert [token.token_id for _, token in by_rank[1][1].tokens] == tokens[1 : 1 + num_steps]
    assert by_rank[1][1].num_slots_used == by_rank[1][0].num_slots_used + num_steps


@pytest.mark.parametrize("group", [(0,), (1, 0)])
def test_all_ranks_of_all_members_take_the_same_steps(folder: Path, group: tuple[int, ...]) -> None:
    """Only rank 0 of the leader receives the end in time."""
    script = LeaseScript(folder, group, (NUM_TOKENS, NUM_TOKENS))
    script.lease(Lease(group, (group[-1], group[0]), 9))
    stops = {group[0]: Stop(4, reported_in=2)}
    by_rank = run_commands(folder, 2, script.commands, stops, takes_leases=True, tp_size=2)
    members = [outcomes[1] for rank, outcomes in enumerate(by_rank) if rank // 2 in group]
    assert [outcome.num_steps for outcome in members] == [4] * len(members)
    reported = [token for outcome in members for _, token in outcome.tokens]
    for live in script.lives:
        tokens = [token.token_id for token in reported if token.request_id == live.request.request_id]
        assert sorted(tokens) == sorted(2 * live.output_token_ids[1:5])  # by each rank of its master
