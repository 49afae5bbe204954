"""One real server of two engines, of which one is short of room: it borrows, and tokens stay the same."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from chaos_runs import chaos_run
from child_processes import with_descendants
from requests_for_tests import expected
from served import Served, assert_gone, served, wait_until

from loong.launcher.cli import main
from loong.model.tiny import tiny_model

HEADERS = {"Authorization": "Bearer operators-key"}
POOL, LENGTH = 2000, 400
SHARED = tuple(5 + 11 * i % 90 for i in range(800))
# The best logit of each token leads by 2e-3, so that sums of floats in any order give the same tokens.
PROMPTS = [(*SHARED, *(5 + (7 * i + number) % 90 for i in range(40))) for number in (0, 1, 2, 3, 6)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs") / "decisions.jsonl"


@pytest.fixture(scope="module")
def server(folder: Path, log: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    flags = (
        *("--num-instances", "2", "--num-engines", "2", "--lend", "--dtype", "float32"),
        *("--kv-cache-tokens", str(POOL), "--allow-fault-injection", "--decision-log", str(log)),
        *("--admin-key", "operators-key", "--served-model-name", "loong-tiny"),
    )
    with served(tmp_path_factory.mktemp("engines"), str(folder), *flags) as running:
        yield running
        processes = with_descendants(running.process.pid)
        assert running.stop() == 0, running.log
    assert_gone(processes)


@pytest.fixture(autouse=True)
def _all_serve(server: Served) -> Iterator[None]:
    yield
    wait_until(lambda: server.health().get("status") == "ok", 60, "all engines to serve")


def loans(server: Served) -> list[dict[str, Any]]:
    return [loan for engine in server.health()["engines"].values() for loan in engine.get("loans", ())]


def both_sides_of_a_loan(server: Served) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a loan as both engines see it, at one moment: it may be given back at the next."""
    found: list[dict[str, Any]] = []

    def is_seen() -> bool:
        found[:] = loans(server)
        return len(found) == 2

    wait_until(is_seen, 30, "a loan, as both engines see it")
    return found[0], found[1]


def shown(server: Served, engine_id: int) -> list[list[Any]]:
    """Return the loans that the dashboard of an engine shows."""
    with httpx.stream("GET", f"{server.url}/dashboard/events?engine={engine_id}", timeout=30) as feed:
        events = (line for line in feed.iter_lines() if line.startswith("data: {"))
        next(events)  # the constant data of the page
        found: list[list[Any]] = json.loads(next(events).removeprefix("data: "))["loans"]
        return found


def answer(server: Served, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Return the tokens of an answer to a prompt."""
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    found = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).raise_for_status().json()
    tokens: list[int] = found["choices"][0]["token_ids"]
    return tokens


def skewed(server: Served, pool: ThreadPoolExecutor) -> list[Any]:
    """Send requests of one document, which go to the engine that has it cached."""
    answer(server, SHARED, 1)
    return [pool.submit(answer, server, prompt, LENGTH) for prompt in PROMPTS]


def assert_answers(folder: Path, sent: list[Any]) -> None:
    for prompt, found in zip(PROMPTS, sent, strict=True):
        assert found.result() == expected(folder, prompt, LENGTH)[0]


def test_an_engine_that_is_short_of_room_borrows_it_and_gives_it_back(
    server: Served, folder: Path, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        sent = skewed(server, pool)
        seen, others = both_sides_of_a_loan(server)
        assert {**seen, "seconds": 0} == {**others, "seconds": 0}
        assert {seen["creditor"], seen["debtor"]} == {0, 1}
        assert seen["reason"] == "its own memory was full"
        names = "loong:lent_tokens", "loong:borrowed_tokens"
        wait_until(lambda: server.metric(names[0]) == server.metric(names[1]) > 0, 30, "metrics of the loan")
        parties = [seen[name] for name in ("creditor", "debtor")]
        wait_until(
            lambda: parties in [loan[:2] for loan in shown(server, seen["debtor"])], 30, "the dashboard"
        )
        assert_answers(folder, sent)
    assert server.metric("loong:kv_served_tokens_total") > 0
    wait_until(lambda: not loans(server), 30, "the room to return")
    capacity = server.metric("loong:instance_kv_capacity_tokens")
    assert capacity == 2 * POOL
    debtor_log = log.with_name(f"decisions.engine-{seen['debtor']}.jsonl")
    creditor_log = log.with_name(f"decisions.engine-{seen['creditor']}.jsonl")
    lines = [json.loads(line) for line in debtor_log.read_text().splitlines()]
    whys = [line.get("why", "") for line in lines if line["line"] == "instance_joined"]
    assert f"engine {seen['creditor']} lends {seen['num_tokens']} tokens of room" in whys[0]
    lines = [json.loads(line) for line in creditor_log.read_text().splitlines()]
    changes = [line["line"] for line in lines if line["line"].startswith("room")]
    assert changes.count("room_lent") == changes.count("room_returned") > 0
    capsys.readouterr()
    assert main(["explain", str(debtor_log)]) == 0
    assert f"{seen['num_tokens']} tokens" in capsys.readouterr().out


def test_a_request_that_no_engine_has_room_for_alone_is_answered(server: Served, folder: Path) -> None:
    """Two such requests wait for each other's loans."""
    prompts = [tuple(5 + (11 * i + number) % 90 for i in range(POOL + 900)) for number in range(2)]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda prompt: answer(server, prompt, 20), prompts))
    assert found == [expected(folder, prompt, 20)[0] for prompt in prompts]
    too_long = {"prompt": (*prompts[0], *prompts[0]), "max_tokens": 2}
    assert httpx.post(f"{server.url}/v1/completions", json=too_long, timeout=60).status_code == 400
    wait_until(lambda: not loans(server), 30, "the room to return")


@pytest.mark.parametrize("victim", ["debtor", "creditor", "gManager"])
def test_no_token_changes_when_a_part_of_a_loan_is_killed(server: Served, folder: Path, victim: str) -> None:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        sent = skewed(server, pool)
        wait_until(lambda: len(loans(server)) == 2, 30, "a loan")
        fault: dict[str, Any] = {"fault": "kill_manager"}
        if victim != "gManager":
            fault = {"fault": "kill_engine", "engine": loans(server)[0][victim]}
        httpx.post(f"{server.url}/admin/faults", json=fault, headers=HEADERS).raise_for_status()
        assert_answers(folder, sent)
    wait_until(lambda: server.health()["status"] == "ok" and not loans(server), 60, "all to return")
    assert server.metric("loong:instance_kv_capacity_tokens") == 2 * POOL


def test_no_token_is_lost_or_changed_while_engines_and_workers_are_killed(server: Served) -> None:
    faults = ("--kill-engine", "1/3s", "--kill", "1/2s", "--kill-manager", "1/2s", "--duration", "4s")
    load = ("--longest-output", "600", "--request-rate", "6", "--admin-key", "operators-key")
    with chaos_run(server.url, *faults, *load) as run:
        output, errors = run.communicate(timeout=300)
    assert run.returncode == 0, output + errors + server.log
    report = json.loads(output.splitlines()[-1])
    assert report["num_complete_requests"] == report["num_requests"] > 0
    assert report["num_engine_losses"] == sum(f["kind"] == "kill_engine" for f in report["faults"]) > 0
    assert {f["kind"] for f in report["faults"]} == {"kill", "kill_engine", "kill_manager"}
    assert report["health"] == "ok"
