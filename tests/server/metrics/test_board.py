"""The queries of a board's panels, answered from a server's metrics before and after some requests."""

import math

import httpx
import pytest
from http_answers import post
from promql import Scrapes
from scripted_engine import ScriptedEngine, Serving

SECONDS = 10.0  # that the two are taken to be apart

HISTOGRAMS = ("e2e_request_latency_seconds", "inter_token_latency_seconds", "time_to_first_token_seconds")


async def scrapes(serving: Serving) -> Scrapes:
    """Return three requests of 5 prompt tokens (one begins it) and 8 of output each, between the two."""
    async with serving(ScriptedEngine()) as url, httpx.AsyncClient(timeout=30) as client:
        await post(url, "/v1/completions", prompt="abcd", max_tokens=8)
        before = (await client.get(f"{url}/metrics")).text
        for _ in range(3):
            await post(url, "/v1/completions", prompt="abcd", max_tokens=8)
        return Scrapes(before, (await client.get(f"{url}/metrics")).text, SECONDS)


def only(values: dict[frozenset[tuple[str, str]], float]) -> float:
    (value,) = values.values()
    return value


async def test_rates_and_increases_are_of_what_was_asked(serving: Serving) -> None:
    reported = await scrapes(serving)
    of_model = '{model_name="tiny"}'
    assert only(reported.answer(f"rate(vllm:prompt_tokens_total{of_model}[1m])")) == 3 * 5 / SECONDS
    assert only(reported.answer(f"rate(vllm:generation_tokens_total{of_model}[1m])")) == 3 * 8 / SECONDS
    ended = reported.answer(f"sum by(finished_reason) (increase(vllm:request_success_total{of_model}[1m]))")
    assert ended == {frozenset({("finished_reason", "length")}): 3}
    lengths = reported.answer(f"sum by(le) (increase(vllm:request_prompt_tokens_bucket{of_model}[1m]))")
    assert max(lengths.values()) == 3
    assert lengths[frozenset({("le", "2.0")})] == 0
    assert lengths[frozenset({("le", "5.0")})] == 3


@pytest.mark.parametrize("name", HISTOGRAMS)
async def test_quantiles_and_means_are_within_what_happened(serving: Serving, name: str) -> None:
    reported = await scrapes(serving)
    series = f"vllm:{name}"
    mean = only(
        reported.answer(
            f'rate({series}_sum{{model_name="tiny"}}[1m]) / rate({series}_count{{model_name="tiny"}}[1m])'
        )
    )
    assert 0 < mean < 30
    quantiles = [
        only(reported.answer(f"histogram_quantile({share}, sum by(le) (rate({series}_bucket[1m])))"))
        for share in (0.5, 0.9, 0.99)
    ]
    assert quantiles == sorted(quantiles)
    assert all(math.isfinite(value) for value in quantiles)


async def test_another_models_series_are_not_reported(serving: Serving) -> None:
    reported = await scrapes(serving)
    for query in (
        'vllm:num_requests_running{model_name="other"}',
        'vllm:kv_cache_usage_perc{model_name!="tiny"}',
    ):
        assert reported.answer(query) == {}
    assert only(reported.answer('vllm:num_requests_running{model_name=~"ti.+"}')) == 0
