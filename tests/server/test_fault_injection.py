"""`/admin/faults` exists only on a server that allows it, and names what it did or why it could not."""

import signal

import httpx
import pytest
from http_answers import error_of, post
from scripted_engine import ScriptedEngine, Serving

from loong.engine.faults import WorkerFaults

PATH = "/admin/faults"


class Signals:
    """The live instances 0 and 2, and the signals that they get."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int]] = []
        self.faults = WorkerFaults(lambda i: [lambda number: self.sent.append((i, number))], lambda: {0, 2})


async def test_a_server_that_does_not_allow_faults_has_none(serving: Serving) -> None:
    async with serving(ScriptedEngine()) as url:
        error = await error_of(url, PATH, 404, fault="kill")
    assert error["code"] == "fault_injection_is_off"
    assert "--allow-fault-injection" in error["message"]


async def test_a_fault_hits_the_named_instance_or_the_next(serving: Serving) -> None:
    signals = Signals()
    async with serving(ScriptedEngine(), faults=signals.faults) as url:
        named = await post(url, PATH, fault="kill", instance=2)
        other = await post(url, PATH, fault="pause", seconds=3600)
    assert named.json() == {"fault": "kill", "instance": 2}
    assert other.json() == {"fault": "pause", "instance": 0}
    assert signals.sent == [(2, signal.SIGKILL), (0, signal.SIGSTOP)]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "fault"),
        ({"fault": "melt"}, "fault"),
        ({"fault": "kill", "instance": -1}, "instance"),
        ({"fault": "pause", "seconds": -1}, "seconds"),
        ({"fault": "kill", "seed": 1}, "seed"),
    ],
)
async def test_other_faults_are_refused_by_the_wrong_field(
    serving: Serving, body: dict[str, object], param: str
) -> None:
    signals = Signals()
    async with serving(ScriptedEngine(), faults=signals.faults) as url:
        assert (await error_of(url, PATH, 400, **body))["param"] == param
    assert not signals.sent


async def test_an_instance_that_is_not_live_is_a_conflict(serving: Serving) -> None:
    async with serving(ScriptedEngine(), faults=Signals().faults) as url:
        error = await error_of(url, PATH, 409, fault="kill", instance=1)
    assert (error["code"], error["param"]) == ("instance_not_live", "instance")
    assert "live are [0, 2]" in error["message"]


async def test_a_server_with_an_admin_key_takes_faults_with_it_alone(serving: Serving) -> None:
    signals = Signals()
    body = {"fault": "kill"}
    async with (
        serving(ScriptedEngine(), faults=signals.faults, api_keys=("key",), admin_key="admin") as url,
        httpx.AsyncClient(timeout=30) as client,
    ):
        answers = [
            await client.post(f"{url}{PATH}", json=body, headers={"Authorization": f"Bearer {key}"})
            for key in ("key", "admin")
        ]
    assert [answer.status_code for answer in answers] == [401, 200]
    assert signals.sent == [(0, signal.SIGKILL)]
