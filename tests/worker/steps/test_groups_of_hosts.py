"""Steps inside a host are captured, those of groups on several hosts are not: both are exact."""

from pathlib import Path

from captured_runs import run_by_mailboxes
from group_leases import NUM_TOKENS, Lease, LeaseScript
from socket_worlds import Carrier

from loong.fabric.traffic import Channel

NEAR = Lease((2, 0), (0, 2), 3)
ALONE = Lease((2,), (2, 2), 3)  # instance 0 serves it
FAR = Lease((0, 1, 2), (0, 1), 3)


def test_groups_that_change_hosts_give_the_tokens_of_transformers(folder: Path) -> None:
    """Instances 0 and 2 share a host."""
    script = LeaseScript(folder, (0, 2), (NUM_TOKENS, NUM_TOKENS))
    for lease in (NEAR, ALONE, FAR, Lease((2, 1, 0), (0, 2), 1)):
        script.lease(lease)
    by_rank = run_by_mailboxes(folder, 3, script.commands, Carrier.HOSTS_OF_ARENAS)
    reported = [
        token for step in zip(*by_rank, strict=True) for outcome in step for _, token in outcome.tokens
    ]
    for live in script.lives:
        tokens = [token for token in reported if token.request_id == live.request.request_id]
        assert [token.token_id for token in tokens] == live.output_token_ids
    num_queries = [outcome.traffic[Channel.QUERIES].messages for outcome in by_rank[0]]
    assert [number > 0 for number in num_queries[-3:]] == [False, True, True]
