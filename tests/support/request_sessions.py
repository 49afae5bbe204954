"""Requests that continue others or begin like them, and when KV of theirs is on several instances."""

from pathlib import Path
from random import Random

from cluster import After
from requests_for_tests import expected, greedy_request, random_prompt

from loong.core.positions import first_overlap
from loong.core.request import Request
from loong.core.snapshot import Snapshot

NUM_TOKENS = 6  # of each answer


def sessions(folder: Path, random: Random, num_turns: int) -> tuple[list[Request], dict[str, After]]:
    """Return requests of which each continues some earlier one with its answer, or begins like it."""
    requests, arrivals = [greedy_request(random_prompt(random.randint(20, 40), seed=7), NUM_TOKENS)], {}
    for turn in range(1, num_turns):
        earlier = random.choice(requests)
        prompt = [*earlier.prompt_token_ids]
        if random.random() < 0.6:
            answer, _ = expected(folder, earlier.prompt_token_ids, NUM_TOKENS)
            prompt += answer
        else:
            prompt = prompt[: random.randint(1, len(prompt))]
        new = random_prompt(random.randint(1, 12), seed=100 + turn)
        requests.append(greedy_request((*prompt, *new)[:150], NUM_TOKENS))
        arrivals[requests[-1].request_id] = After(earlier.request_id, random.randint(1, NUM_TOKENS))
    return requests, arrivals


def has_copies_that_are_read(snapshot: Snapshot) -> bool:
    """Return whether some KV is on several instances, and requests read it."""
    return any(
        first_overlap(segment.positions for segment in owner.placement.segments)
        and owner.unread.num_tokens < owner.placement.num_tokens
        for owner in snapshot.owners.values()
    )
