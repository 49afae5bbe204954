"""`loong scale` changes the number of instances of a server, whose streams go on."""

from collections.abc import Iterator

import httpx
import pytest
from served import IMPATIENT_ENTRY, Served, served, wait_until

from loong.launcher.cli import main

KEY = "operators-key"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    flags = ("--num-instances", "1", "--max-instances", "2", "--kv-cache-tokens", "2048")
    others = ("--api-server-count", "2", "--decision-log", "decisions.jsonl", "--admin-key", KEY)
    directory = tmp_path_factory.mktemp("scaling")
    with served(directory, *flags, *others, "--allow-fault-injection", entry=IMPATIENT_ENTRY) as running:
        yield running


def scale(server: Served, *flags: str) -> None:
    assert main(["scale", "--base-url", server.url, "--admin-key", KEY, *flags]) == 0


def assert_too_large(server: Served) -> None:
    """Assert that a request for two instances is refused as too large by every API process."""
    for _ in range(8):  # connections, which the system spreads among the processes
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "hello", "max_tokens": 3000})
        assert answer.status_code == 400
        assert "2048 tokens" in answer.json()["error"]["message"]


def test_instances_join_and_leave_while_a_stream_goes_on(
    server: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {"prompt": "hello", "max_tokens": 600, "temperature": 0, "ignore_eos": True}
    expected = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json={**body, "stream": True}, timeout=60
    ) as response:
        lines = response.iter_lines()
        first = next(lines)
        scale(server, "--num-instances", "2")
        grown = capsys.readouterr().out
        scale(server, "--num-instances", "1")
        shrunk = capsys.readouterr().out
        assert_too_large(server)
        rest = [line for line in lines if line]
    assert "instance 1: serving" in grown
    assert "done after" in grown
    assert "instances: 1 serving, 1 wanted, 2 at most" in shrunk
    texts = [httpx.Response(200, text=line[6:]).json() for line in (first, *rest) if line != "data: [DONE]"]
    assert "".join(text["choices"][0]["text"] for text in texts) == expected["choices"][0]["text"]
    assert rest[-1] == "data: [DONE]"
    scale(server)
    assert "instance 0: serving" in capsys.readouterr().out


def test_a_quarantined_instance_lowers_the_limit_of_a_request_until_it_joins_again(server: Served) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    for_two = {"prompt": [1] * 2500, "max_tokens": 1}

    def is_quarantined() -> bool:
        kill = {"fault": "kill", "instance": 1}
        httpx.post(f"{server.url}/admin/faults", json=kill, headers=headers)  # 409 unless it serves
        found = httpx.get(f"{server.url}/admin/instances", headers=headers).json()["instances"]
        return [instance["state"] for instance in found] == ["serving", "quarantined"]

    def statuses() -> set[int]:
        """Return those of a request for two instances, by all API processes."""
        answers = [httpx.post(f"{server.url}/v1/completions", json=for_two, timeout=60) for _ in range(8)]
        return {answer.status_code for answer in answers}

    scale(server, "--num-instances", "2")
    wait_until(lambda: statuses() == {200}, 60, "the limit of two instances")
    wait_until(is_quarantined, 60, "the quarantine of instance 1")
    wait_until(lambda: statuses() == {400}, 60, "the lower limit")
    assert_too_large(server)
    scale(server, "--num-instances", "2")
    wait_until(lambda: statuses() == {200}, 60, "the limit of two instances")
    scale(server, "--num-instances", "1")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--num-instances", "3", "--admin-key", KEY), "from 1 to 2, which is --max-instances"),
        (("--num-instances", "2", "--admin-key", "another"), "needs the admin key"),
    ],
)
def test_a_refusal_is_one_line_with_the_reason(
    server: Served, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], reason: str
) -> None:
    assert main(["scale", "--base-url", server.url, *flags]) == 1
    assert reason in capsys.readouterr().err


def test_without_a_key_or_a_server_nothing_is_sent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOONG_ADMIN_API_KEY", raising=False)
    assert main(["scale", "--num-instances", "2"]) == 1
    assert "--admin-key" in capsys.readouterr().err
    assert main(["scale", "--base-url", "http://127.0.0.1:9", "--admin-key", KEY]) == 1
    assert "does not answer" in capsys.readouterr().err
