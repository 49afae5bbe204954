"""Workers on GPUs give the tokens of those on processors; GPUs that are too few are shared by instances."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from leak_checks import shared_cluster
from machines import H200_GRAPH_LIMITS
from plans import in_group
from requests_for_tests import (
    SCHEMA,
    assert_exact,
    assert_prompt_exact,
    expected,
    greedy_request,
    random_prompt,
    sampled_request,
    scored_request,
)

from loong.core.cost.cost_model import CostModel
from loong.core.instructions import ExtendLease
from loong.core.plan import IterationPlan, Transfer
from loong.core.snapshot import Snapshot
from loong.launcher.cluster.config import ClusterConfig
from loong.model.tiny import tiny_model
from loong.scheduler.common.lease_extensions import extending

pytestmark = pytest.mark.gpu

KINDS: tuple[dict[str, object], ...] = (
    {"seed": 1},
    {"seed": 2, "num_logprobs": 3},
    {"seed": 3, "top_k": 9, "top_p": 0.9, "temperature": 0.7},
    {"seed": 4, "presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.1},
    {"seed": 5, "min_tokens": 8, "stop_token_ids": tuple(range(0, 97, 3))},
    {"seed": 6, "stop_token_ids": tuple(range(0, 97, 8))},
    {"seed": 7, "temperature": 3.0, "grammar": SCHEMA, "stop_token_ids": (2,)},
    {
        "seed": 8,
        "temperature": 2.0,
        "allowed_token_ids": (3, 5, 40),
        "bad_words": ((3, 5), (5, 5), (40, 3, 40)),
    },
    {"seed": 9, "bad_words": tuple((token_id,) for token_id in range(0, 97, 2)), "num_logprobs": 1},
    {
        "seed": 10,
        "temperature": 3.0,
        "grammar": SCHEMA,
        "stop_token_ids": (2,),
        "bad_words": ((91, 49), (48,)),
    },
)


@pytest.fixture(scope="module")
def on_gpus(folder: Path) -> Iterator[Cluster]:
    """Yield instances 0 to 2, and their host tiers."""
    config = ClusterConfig(
        str(folder),
        num_instances=3,
        kv_capacity=400,
        host_kv_capacity=96,
        device="cuda",
        graph_limits=H200_GRAPH_LIMITS,
        tokenizer_folder=str(tiny_model(folder.parent)),
    )
    with shared_cluster(config) as running:
        yield running


@pytest.mark.parametrize("group", [(0,), (2, 1), (1, 0, 2)])
@pytest.mark.parametrize("transfer", Transfer)
@pytest.mark.parametrize("num_steps", [1, 5])
def test_any_dop_gives_the_tokens_and_log_probabilities_of_transformers(
    on_gpus: Cluster, folder: Path, group: tuple[int, ...], transfer: Transfer, num_steps: int
) -> None:
    requests = [greedy_request(random_prompt(length, seed=length), 12) for length in (50, 33, 7)]
    policy = in_group(*group, chunk=19, transfer=transfer, num_steps=num_steps)
    assert_exact(folder, requests, on_gpus.run(requests, policy))


@pytest.mark.parametrize("group", [(0,), (2, 1), (1, 0, 2)])
@pytest.mark.parametrize("transfer", Transfer)
def test_any_dop_gives_the_log_probabilities_of_prompts_of_transformers(
    on_gpus: Cluster, folder: Path, group: tuple[int, ...], transfer: Transfer
) -> None:
    requests = [scored_request(length, num_top=3) for length in (50, 33, 7)]
    assert_exact(folder, requests, on_gpus.run(requests, in_group(*group, chunk=19, transfer=transfer)))
    for request in requests:
        assert_prompt_exact(folder, request, on_gpus.prompt_logprobs[request.request_id])


@pytest.fixture(scope="module")
def sharded_on_gpus(folder: Path) -> Iterator[Cluster]:
    """Instance 0 of two ranks, each on a GPU of its own."""
    config = ClusterConfig(
        str(folder),
        num_instances=1,
        tp_size=2,
        kv_capacity=400,
        device="cuda",
        graph_limits=H200_GRAPH_LIMITS,
    )
    with shared_cluster(config) as running:
        yield running


@pytest.mark.multigpu
@pytest.mark.parametrize("num_steps", [1, 5])
@pytest.mark.parametrize("num_logprobs", [5, None])
def test_ranks_of_one_instance_give_the_tokens_of_transformers(
    sharded_on_gpus: Cluster, folder: Path, num_steps: int, num_logprobs: int | None
) -> None:
    requests = [greedy_request(random_prompt(n, seed=n), 12, num_logprobs=num_logprobs) for n in (50, 33, 7)]
    outputs = sharded_on_gpus.run(requests, in_group(0, chunk=19, num_steps=num_steps))
    for request in requests:
        tokens, _ = expected(folder, request.prompt_token_ids, request.sampling_params.max_tokens)
        assert [token.token_id for token in outputs[request.request_id]] == tokens


@pytest.mark.multigpu
def test_ranks_of_one_instance_give_the_log_probabilities_of_prompts_of_transformers(
    sharded_on_gpus: Cluster, folder: Path
) -> None:
    requests = [scored_request(length, num_top=3) for length in (50, 33, 7)]
    assert_exact(folder, requests, sharded_on_gpus.run(requests, in_group(0, chunk=19)))
    for request in requests:
        assert_prompt_exact(folder, request, sharded_on_gpus.prompt_logprobs[request.request_id])


@pytest.mark.parametrize("group", [(0,), (2, 1), (1, 0, 2)])
def test_steps_that_do_not_wait_for_the_host_give_the_tokens_of_transformers(
    on_gpus: Cluster, folder: Path, group: tuple[int, ...]
) -> None:
    requests = [greedy_request(random_prompt(9 + n, seed=n), 20 + n, num_logprobs=None) for n in range(11)]
    outputs = on_gpus.run(requests, in_group(*group, num_steps=7))
    for request in requests:
        tokens, _ = expected(folder, request.prompt_token_ids, request.sampling_params.max_tokens)
        assert [token.token_id for token in outputs[request.request_id]] == tokens


@pytest.mark.parametrize("group", [(0,), (2, 1), (1, 0, 2)])
def test_leases_that_go_on_give_the_tokens_of_transformers(
    on_gpus: Cluster, folder: Path, group: tuple[int, ...]
) -> None:
    requests = [
        greedy_request(random_prompt(9 + n, seed=n), 20 + 16 * n, num_logprobs=None) for n in range(4)
    ]
    run_all = in_group(*group, num_steps=7)

    def policy(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        return extending(run_all(snapshot, cost_model), snapshot, 7)

    outputs = on_gpus.run(requests, policy)
    assert any(isinstance(what, ExtendLease) for what in on_gpus.log)
    for request in requests:
        tokens, _ = expected(folder, request.prompt_token_ids, request.sampling_params.max_tokens)
        assert [token.token_id for token in outputs[request.request_id]] == tokens


@pytest.mark.parametrize("group", [(0,), (1, 0, 2)])
@pytest.mark.parametrize("num_steps", [1, 6])
@pytest.mark.parametrize("kinds", [KINDS[:6], KINDS[6:]], ids=["plain", "limited"])
def test_what_is_drawn_is_what_processors_draw(
    cluster: Cluster,
    on_gpus: Cluster,
    group: tuple[int, ...],
    num_steps: int,
    kinds: tuple[dict[str, object], ...],
) -> None:
    tokens = []
    for running in (cluster, on_gpus):
        requests = [sampled_request(random_prompt(15, seed=n), 16, **p) for n, p in enumerate(kinds)]
        outputs = running.run(requests, in_group(*group, num_steps=num_steps))
        tokens.append([[token.token_id for token in outputs[r.request_id]] for r in requests])
    assert tokens[1] == tokens[0]
