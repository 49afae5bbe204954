"""Processes that answer clients of an engine which the test holds."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from child_processes import name_of, own_forked
from http_answers import events_of, get_json, post
from prometheus_client.parser import text_string_to_metric_families
from raw_http import until
from scripted_engine import ScriptedEngine

from loong.core.errors import ClusterError
from loong.engine.health import dead
from loong.launcher.serve.api_process import ApiProcessConfig
from loong.launcher.serve.api_processes import Shown, api_processes
from loong.launcher.serve.front import Front
from loong.model.tiny import CONFIG, tiny_model
from loong.observability.decision_log.recent import RecentLines
from loong.observability.decision_log.runs import RequestRuns
from loong.server.api.listen import bound_socket
from loong.server.cluster_app import cluster_of, create_cluster_app
from loong.server.local_engine import LocalEngineClient
from loong.server.metrics.request_observers import RequestObservers, Targets
from loong.server.remote.forwarding import RemoteCluster
from loong.server.settings import ServerSettings

PATH = "/v1/completions"


@dataclass
class Service:
    """The service of two processes."""

    url: str
    front: Front
    failures: list[BaseException]

    @property
    def pids(self) -> list[int]:
        return [pid for pid in own_forked("api_process") if name_of(pid) == "loong-api"]

    async def samples(self) -> dict[str, float]:
        async with httpx.AsyncClient(timeout=30) as client:
            text = (await client.get(f"{self.url}/metrics")).text
        families = list(text_string_to_metric_families(text))
        names = [family.name for family in families]
        assert len(names) == len(set(names)), names
        return {sample.name: sample.value for family in families for sample in family.samples}


@asynccontextmanager
async def two_processes(folder: Path, engine: ScriptedEngine) -> AsyncIterator[Service]:
    settings = ServerSettings("tiny")
    request_observers = RequestObservers(
        "esp", RecentLines(), RequestRuns(), dict, lambda _num: Targets(1.0, 1.0)
    )
    cluster = cluster_of(engine, settings, request_observers=request_observers)
    failures: list[BaseException] = []

    def process_config(socket_path: str) -> ApiProcessConfig:
        remote_cluster = RemoteCluster(socket_path, has_dashboard=True, has_spans=False)
        return ApiProcessConfig(
            settings, engine.limits, str(folder), CONFIG.eos_token_ids, remote_cluster, "text"
        )

    client = LocalEngineClient(engine, cluster.admission)
    shown = Shown(create_cluster_app(cluster), cluster.registry, cluster.admission)
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(bound_socket("127.0.0.1", 0))
        address = "http://{}:{}".format(*listener.getsockname())
        front = await stack.enter_async_context(
            api_processes(process_config, 2, client, shown, listener, failures.append)
        )
        yield Service(address, front, failures)


def is_refused(url: str) -> bool:
    try:
        httpx.get(f"{url}/version", timeout=30)
    except httpx.ConnectError:
        return True
    except httpx.TransportError:
        return False  # the kernel had connected it when the last process stopped listening
    return False


async def test_two_processes_serve_one_port_and_are_counted_as_one(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with two_processes(tiny_model(tmp_path), engine) as service:
        num_requests = 40
        answers = await asyncio.gather(
            *(
                post(service.url, PATH, prompt="abc", max_tokens=5, stream=i % 2 > 0)
                for i in range(num_requests)
            )
        )
        assert {answer.status_code for answer in answers} == {200}
        assert len({request.request_id for request in engine.requests}) == num_requests
        assert (await post(service.url, PATH)).status_code == 400
        samples = await service.samples()
        assert samples["vllm:generation_tokens_total"] == 5 * num_requests
        assert samples["vllm:e2e_request_latency_seconds_count"] == num_requests
        assert samples["loong:request_refused_total"] == 1
        assert await get_json(service.url, "/health") == {"status": "ok"}
        assert await get_json(service.url, "/load") == {"server_load": 0}
        assert "traceEvents" in await get_json(service.url, "/trace")

        engine.condition = dead("no step ended for 60 s")
        async with httpx.AsyncClient(timeout=30) as client:
            assert (await client.get(f"{service.url}/health")).status_code == 503

        await service.front.stop_listening()
        await until(lambda: is_refused(service.url))  # once the processes have heard of it
    assert not service.failures
    assert not service.pids


async def test_a_process_that_is_killed_is_replaced_and_the_others_streams_go_on(tmp_path: Path) -> None:
    engine = ScriptedEngine(pause_at=1)
    async with two_processes(tiny_model(tmp_path), engine) as service:
        before = service.pids
        asking = [
            asyncio.create_task(post(service.url, PATH, prompt="abc", max_tokens=5, stream=True))
            for _ in range(40)
        ]
        await until(
            lambda: len(engine.num_produced) == len(asking) and min(engine.num_produced.values()) == 1
        )
        os.kill(before[0], signal.SIGKILL)
        await until(lambda: bool(engine.aborted))
        engine.resume.set()
        answers = await asyncio.gather(*asking, return_exceptions=True)
        whole = [events_of(answer) for answer in answers if isinstance(answer, httpx.Response)]
        assert 0 < len(whole) < len(asking)
        assert len(whole) + len(engine.aborted) == len(asking)
        assert all(len(events) == 5 for events in whole)
        await until(lambda: len(set(service.pids) - set(before)) == 1)
        await until(lambda: service.front.admission.num_in_flight == 0)
        assert (await post(service.url, PATH, prompt="abc")).status_code == 200
        os.kill(service.pids[0], signal.SIGTERM)  # is for the engine's process
        assert (await post(service.url, PATH, prompt="abc")).status_code == 200
    assert not service.failures


async def test_a_process_that_cannot_start_is_an_error_of_the_service(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"API process \d did not start: it exited with code 1"):
        async with two_processes(tmp_path / "nothing", ScriptedEngine()):
            pass
