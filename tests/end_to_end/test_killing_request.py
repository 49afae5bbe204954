"""A request that kills every worker that computes it: it fails by name, and others get all their tokens."""

import json
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from failing_worker import ARMED, arm_token
from served import FAILING_ENTRY, Served, served, wait_until

from loong.core.plan import FailureCause
from loong.scheduler.tuning import MAX_LOSSES, MAX_OTHER_LOSSES

CODE = FailureCause.LOSSES.value
NUM_OTHERS, FATAL_TOKEN = 5, 200


@dataclass(frozen=True)
class Killing:
    """A server whose workers die at a token."""

    server: Served
    armed: Path

    def complete(self, prompt: list[int], **fields: object) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **fields}
        bias = {"logit_bias": {FATAL_TOKEN: -100}}
        return httpx.post(f"{self.server.url}/v1/completions", json=body | bias, timeout=120)

    def num_lost(self) -> int:
        return int(self.server.metric("loong:instance_losses_total"))


@pytest.fixture(scope="module")
def killing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killing]:
    armed = tmp_path_factory.mktemp("armed")
    flags = ("--num-instances", "3", "--api-server-count", "2", "--max-num-batched-tokens", "512")
    folder = tmp_path_factory.mktemp("killing")
    with served(folder, *flags, entry=FAILING_ENTRY, environment={ARMED: str(armed)}) as server:
        yield Killing(server, armed)


def others() -> list[list[int]]:
    return [[3 + (7 * n + i) % 190 for i in range(300 + 40 * n)] for n in range(NUM_OTHERS)]


def test_it_fails_by_name_and_its_neighbors_get_the_tokens_of_an_undisturbed_run(killing: Killing) -> None:
    expected = [killing.complete(prompt).json()["choices"][0]["text"] for prompt in others()]
    before = killing.num_lost()
    arm_token(killing.armed, FATAL_TOKEN)
    fatal = [*others()[0][:200], FATAL_TOKEN, *others()[1][:200]]
    with ThreadPoolExecutor(NUM_OTHERS + 2) as pool:
        streamed = pool.submit(killing.complete, fatal, stream=True)
        whole = pool.submit(killing.complete, fatal)
        asked: list[Future[httpx.Response]] = [pool.submit(killing.complete, p) for p in others()]
    assert_is_of_the_losses(whole.result().json())
    assert whole.result().status_code == 500
    assert whole.result().headers["X-Should-Retry"] == "false"
    *_, last, done = [line for line in streamed.result().text.splitlines() if line.startswith("data")]
    assert_is_of_the_losses(json.loads(last[6:]))
    assert done == "data: [DONE]"
    assert [one.result().json()["choices"][0]["text"] for one in asked] == expected
    assert MAX_LOSSES <= killing.num_lost() - before <= 2 * (MAX_LOSSES + MAX_OTHER_LOSSES)
    metrics = httpx.get(f"{killing.server.url}/metrics", timeout=30).text
    assert re.search(rf'^loong:request_refused_total{{code="{CODE}",.*}} 1\.0$', metrics, re.MULTILINE)
    wait_until(
        lambda: httpx.get(f"{killing.server.url}/health").json() == {"status": "ok"}, 60, "all to join"
    )


def assert_is_of_the_losses(answer: Mapping[str, Mapping[str, str]]) -> None:
    error = answer["error"]
    assert (error["type"], error["code"]) == ("server_error", CODE)
    found = re.match(r"(\d) instances were lost while they computed request cmpl-", error["message"])
    assert found is not None
    assert MAX_LOSSES <= int(found[1]) <= MAX_LOSSES + MAX_OTHER_LOSSES
