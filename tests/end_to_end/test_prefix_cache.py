"""Prompts that begin alike are computed once by a real server, and answers say so."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from served import Served, served

PROMPT = [5 + 7 * i % 90 for i in range(300)]


@pytest.fixture(scope="module", params=["1", "2"], ids=["one process", "two API processes"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    flags = ("--num-instances", "2", "--kv-cache-tokens", "2000", "--dtype", "float32")
    with served(tmp_path_factory.mktemp("cache"), *flags, "--api-server-count", request.param) as running:
        yield running


@pytest.fixture(autouse=True)
def _nothing_cached(server: Served) -> None:
    httpx.post(f"{server.url}/reset_prefix_cache", timeout=60).raise_for_status()


def asked(server: Served, prompt: list[int] | list[list[int]], **fields: object) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    found = httpx.post(f"{server.url}/v1/completions", json=body | fields, timeout=120)
    answer: dict[str, Any] = found.raise_for_status().json()
    return answer


def tokens_of(answer: dict[str, Any]) -> list[int]:
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


def cached(answer: dict[str, Any]) -> int:
    number: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return number


def test_a_prompt_is_read_the_second_time_and_answered_the_same(server: Served) -> None:
    first, second = asked(server, PROMPT), asked(server, PROMPT)
    assert (cached(first), cached(second)) == (0, len(PROMPT) - 1)
    assert tokens_of(first) == tokens_of(second)
    turn = asked(server, [*PROMPT, *tokens_of(first), 9, 8, 7])
    assert cached(turn) == len(PROMPT) + 7  # the last token of an answer has no KV


def test_a_shared_prefix_may_end_anywhere(server: Served) -> None:
    asked(server, PROMPT)
    other = [*PROMPT[:123], 4, *PROMPT[124:]]
    assert cached(answer := asked(server, other)) == 123
    assert tokens_of(answer) == tokens_of(asked(server, other, use_prefix_cache=False))


def test_requests_of_different_salts_share_nothing(server: Served) -> None:
    assert cached(asked(server, PROMPT, cache_salt="one")) == 0
    assert cached(asked(server, PROMPT, cache_salt="two")) == 0
    assert cached(asked(server, PROMPT)) == 0
    assert cached(asked(server, PROMPT, cache_salt="one")) == len(PROMPT) - 1


def test_a_request_that_does_not_use_the_cache_neither_reads_nor_leaves_anything(server: Served) -> None:
    assert cached(asked(server, PROMPT, use_prefix_cache=False)) == 0
    assert cached(asked(server, PROMPT)) == 0
    assert cached(asked(server, PROMPT, use_prefix_cache=False)) == 0
    assert cached(asked(server, PROMPT)) == len(PROMPT) - 1


def test_log_probabilities_of_a_prompt_do_not_depend_on_what_is_cached(server: Served) -> None:
    def scored(**fields: object) -> list[float]:
        answer = asked(server, PROMPT, prompt_logprobs=0, **fields)
        assert cached(answer) == 0
        found = answer["choices"][0]["prompt_logprobs"]
        return [next(iter(token.values()))["logprob"] for token in found[1:]]

    alone = scored(use_prefix_cache=False)
    asked(server, PROMPT)
    assert scored() == pytest.approx(alone, rel=1e-5, abs=1e-5)


def test_after_a_reset_everything_is_computed(server: Served) -> None:
    asked(server, PROMPT)
    httpx.post(f"{server.url}/reset_prefix_cache", timeout=60).raise_for_status()
    assert cached(asked(server, PROMPT)) == 0


def test_a_prompt_whose_client_left_in_the_middle_is_answered_the_same(server: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 500, "temperature": 0, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as response:
        next(response.iter_lines())
    longer = [*PROMPT, 1, 2, 3]
    assert tokens_of(asked(server, longer)) == tokens_of(asked(server, longer, use_prefix_cache=False))


def test_equal_prompts_that_come_together_are_computed_once(server: Served) -> None:
    answer = asked(server, [PROMPT, PROMPT, PROMPT, PROMPT])
    assert cached(answer) == 3 * (len(PROMPT) - 1)
    assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) == 1


def test_a_chat_says_in_its_stream_what_was_cached(server: Served) -> None:
    body = {
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    found = []
    for _ in range(2):
        text = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).text
        usage = json.loads(text.strip().split("\n\n")[-2].removeprefix("data: "))["usage"]
        found.append((usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]))
    (number, none), (_, some) = found
    assert (none, some) == (0, number - 1)


def test_metrics_count_what_was_asked_for_and_found(server: Served) -> None:
    names = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")
    before = [server.metric(name) for name in names]
    asked(server, PROMPT)
    asked(server, PROMPT, n=2)
    after = [server.metric(name) for name in names]
    assert [a - b for a, b in zip(after, before, strict=True)] == [2 * len(PROMPT), len(PROMPT) - 1]


def test_a_server_without_the_cache_computes_everything(tmp_path_factory: pytest.TempPathFactory) -> None:
    flags = ("--num-instances", "1", "--kv-cache-tokens", "2000", "--no-enable-prefix-caching")
    with served(tmp_path_factory.mktemp("off"), *flags) as running:
        assert [cached(asked(running, PROMPT)) for _ in range(2)] == [0, 0]
        assert running.metric("vllm:prefix_cache_queries_total") == 0
