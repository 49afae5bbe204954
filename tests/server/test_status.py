import httpx
import msgspec
import pytest
from http_answers import error_of, get_json, post
from prometheus_client.parser import text_string_to_metric_families
from raw_http import raw_connection
from scripted_engine import ScriptedEngine, Serving

import loong
from loong.core.cluster_history import BatchSlice, ClusterHistory
from loong.core.cost.work import Phase
from loong.core.errors import ConfigError
from loong.core.instance import ElasticInstance, ESPGroup, InstanceKind
from loong.core.plan import PreemptionReason
from loong.core.snapshot import ClusterStats, Snapshot
from loong.engine.health import Health, HealthState, Trouble, dead
from loong.server.api.listen import bound_socket
from loong.server.metrics.trace import chrome_trace
from loong.server.settings import ServerSettings
from loong.workloads.metrics.counters import SERIES

STATS = ClusterStats(
    num_scale_ups=3,
    num_scale_downs=2,
    num_hand_overs=9,
    num_served_tokens=44,
    num_relayed_tokens=45,
    num_window_dropped_tokens=46,
    busy_seconds=2.5,
    num_retained_tokens=500,
    num_migrated_tokens=70,
    num_memory_tokens=30,
    num_preemptions_by_reason={PreemptionReason.TOO_LONG: 2, PreemptionReason.NO_ROOM: 1},
    num_batches_by_dop={1: 10, 2: 4, 8: 1, 10: 2, 128: 1},
)
CLUSTER = Snapshot(
    5.0,
    (
        ElasticInstance(0, 1, InstanceKind.FULL, 1000, kv_used=100),
        ElasticInstance(1, 1, InstanceKind.FULL, 1000, kv_used=400),
    ),
    stats=STATS,
)


async def _samples(url: str) -> dict[tuple[str, str], float]:
    """Return every sample by its name and its labels other than the model's."""
    async with httpx.AsyncClient(timeout=30) as client:
        text = (await client.get(f"{url}/metrics")).text
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels.pop("model_name", None) == "tiny" or sample.name.startswith("process_")
            samples[sample.name, ",".join(sample.labels.values())] = sample.value
    return samples


async def test_the_clusters_metrics_are_its_snapshot(serving: Serving) -> None:
    async with serving(ScriptedEngine(cluster=CLUSTER)) as url:
        samples = await _samples(url)
    assert samples["vllm:kv_cache_usage_perc", ""] == 0.25
    assert samples["vllm:num_requests_running", ""] == samples["vllm:num_requests_waiting", ""] == 0
    assert samples["vllm:num_preemptions_total", ""] == 3
    by_reason = {reason: samples["loong:preemptions_total", reason.value] for reason in PreemptionReason}
    assert by_reason == {**dict.fromkeys(PreemptionReason, 0), **STATS.num_preemptions_by_reason}
    assert samples["loong:esp_scale_up_total", ""] == 3
    assert samples["loong:esp_scale_down_total", ""] == 2
    assert samples["loong:esp_hand_over_total", ""] == 9
    assert samples["loong:kv_served_tokens_total", ""] == 44
    assert samples["loong:kv_relayed_tokens_total", ""] == 45
    assert samples["loong:kv_window_dropped_tokens_total", ""] == 46
    assert samples["loong:busy_seconds_total", ""] == 2.5
    assert set(SERIES.values()) <= {name for name, _ in samples}, "what benchmarks read"
    assert samples["loong:kv_retained_tokens_total", ""] == 500
    assert samples["loong:kv_migrated_tokens_total", ""] == 70
    assert samples["loong:kv_memory_tokens_total", ""] == 30
    assert [samples["loong:instance_kv_tokens", i] for i in "01"] == [100, 400]


async def test_group_sizes_are_a_histogram(serving: Serving) -> None:
    async with serving(ScriptedEngine(cluster=CLUSTER)) as url:
        samples = await _samples(url)
    bounds = [*range(1, 9), 12, 16, 24, 32, 64]
    counts = [samples["loong:esp_group_size_bucket", str(float(bound))] for bound in bounds]
    assert counts == [10, 14, 14, 14, 14, 14, 14, 15, 17, 17, 17, 17, 17]
    assert samples["loong:esp_group_size_bucket", "+Inf"] == samples["loong:esp_group_size_count", ""] == 18
    assert samples["loong:esp_group_size_sum", ""] == 10 + 8 + 8 + 20 + 128


async def test_requests_are_counted_as_they_go(serving: Serving) -> None:
    async with serving(ScriptedEngine()) as url:
        await post(url, "/v1/completions", prompt="abc", max_tokens=5)
        await post(url, "/v1/completions", prompt="abc", max_tokens=5, stream=True, stop="b")
        samples = await _samples(url)
    assert samples["vllm:prompt_tokens_total", ""] == 8
    assert samples["vllm:generation_tokens_total", ""] == 8
    assert samples["vllm:time_to_first_token_seconds_count", ""] == 2
    assert samples["vllm:inter_token_latency_seconds_count", ""] == 6
    assert samples["vllm:e2e_request_latency_seconds_count", ""] == 2
    assert samples["vllm:request_success_total", "length"] == 1
    assert samples["vllm:request_success_total", "stop"] == 1
    assert samples["vllm:request_generation_tokens_sum", ""] == 8


async def test_two_servers_count_apart(serving: Serving) -> None:
    async with serving(ScriptedEngine()) as one, serving(ScriptedEngine()) as other:
        await post(one, "/v1/completions", prompt="abc")
        assert ("vllm:request_success_total", "length") not in await _samples(other)


async def test_health_is_the_engines(serving: Serving) -> None:
    async with serving(ScriptedEngine()) as url:
        assert await get_json(url, "/health") == await get_json(url, "/ping") == {"status": "ok"}
    one_lost = Health(HealthState.DEGRADED, "instance 1 was lost", {1: Trouble.RESTARTING})
    async with serving(ScriptedEngine(condition=one_lost)) as url:
        assert await get_json(url, "/health") == {
            "status": "degraded",
            "message": "instance 1 was lost",
            "instances": {"1": "restarting"},
        }
    stuck = ScriptedEngine(condition=dead("no step ended for 60 s"))
    async with serving(stuck) as url, httpx.AsyncClient(timeout=30) as client:
        response = await client.get(f"{url}/health")
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "no step ended for 60 s"


async def test_a_client_may_name_the_server_in_its_request_line(serving: Serving) -> None:
    async with serving(ScriptedEngine()) as url, raw_connection(url) as connection:
        await connection.send(f"GET {url}/load?a=b HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert await connection.status() == 200


async def test_version_load_and_model_are_reported(serving: Serving) -> None:
    async with serving(ScriptedEngine()) as url:
        assert await get_json(url, "/version") == {"version": loong.__version__}
        assert await get_json(url, "/load") == {"server_load": 0}
        (model,) = (await get_json(url, "/v1/models"))["data"]
    assert (model["id"], model["max_model_len"], model["object"]) == ("tiny", 2048, "model")


async def test_a_trace_is_of_what_the_engine_did(serving: Serving) -> None:
    batch = BatchSlice(7, ESPGroup((1, 0)), Phase.PREFILL, 1.5, 2.0, ("r1", "r2"), ((0, 10), (1, 20)))
    history = ClusterHistory((batch,), (), {0: 100, 1: 100})
    async with serving(ScriptedEngine(past=history)) as url:
        assert await get_json(url, "/trace") == msgspec.json.decode(chrome_trace(history))


async def test_text_and_chats_are_tokenized_and_back(serving: Serving) -> None:
    async with serving(ScriptedEngine()) as url:
        text = (await post(url, "/tokenize", prompt="é", return_token_strs=True)).json()
        chat = (await post(url, "/tokenize", messages=[{"role": "user", "content": "a"}])).json()
        back = (await post(url, "/detokenize", tokens=text["tokens"])).json()
        error = await error_of(url, "/tokenize", 400)
        unknown = await error_of(url, "/detokenize", 400, tokens=[264])
    assert text == {
        "count": 3,
        "max_model_len": 2048,
        "tokens": [256, 0xC3, 0xA9],
        "token_strs": ["<|bos|>", "Ã", "©"],  # pieces of the vocabulary, here a byte's character
    }
    assert chat["token_strs"] is None
    assert chat["tokens"] == [256, 261, ord("a"), 259, 262]
    assert back == {"prompt": "<|bos|>é"}
    assert "exactly one" in error["message"]
    assert unknown["param"] == "tokens"


async def test_a_port_in_use_is_named(serving: Serving) -> None:
    async with serving(ScriptedEngine()) as url:
        port = int(url.rsplit(":", 1)[1])
        refusal = pytest.raises(ConfigError, match=f"--host 127.0.0.1 --port {port}: the port is in use")
        with refusal, bound_socket("127.0.0.1", port):
            pass


@pytest.mark.parametrize(
    "wrong", [{"max_waiting_requests": 0}, {"write_timeout": 0.0}, {"retry_after": 0}, {"api_keys": ("",)}]
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"must|API key"):
        ServerSettings("tiny", **wrong)  # type: ignore[arg-type]


def test_settings_do_not_print_keys() -> None:
    assert "secret" not in repr(ServerSettings("tiny", api_keys=("secret",)))


async def test_traces_are_refused_by_a_server_that_writes_none(serving: Serving) -> None:
    async with serving(ScriptedEngine()) as url:
        for path in ("/start_profile", "/stop_profile"):
            assert "--trace-dir" in (await error_of(url, path, 404))["message"]


async def test_a_server_with_an_admin_key_traces_for_it_alone(serving: Serving) -> None:
    async with (
        serving(ScriptedEngine(), api_keys=("key",), admin_key="admin") as url,
        httpx.AsyncClient(timeout=30) as client,
    ):
        for path in ("/start_profile", "/stop_profile"):
            found = [
                (await client.post(url + path, headers={"Authorization": f"Bearer {key}"})).json()["error"]
                for key in ("key", "wrong", "admin")
            ]
            assert [error["code"] for error in found] == ["invalid_admin_key"] * 2 + ["tracing_is_off"]
