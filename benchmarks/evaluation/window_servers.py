"""Servers on processors whose layers with a window keep few tokens, and all: answers, and time, of one burst.

A random Gemma 3 of 12 layers, of which 10 have a window of 64 tokens, is served twice with the same memory
for KV. All requests come at once, each with a prompt of its own. Both kinds of server are asked in turn, in
several rounds, and the answers are compared.

    python benchmarks/evaluation/window_servers.py                                      # some minutes
"""

import asyncio
import json
import shlex
import sys
from argparse import Namespace
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

import httpx

sys.path.append(str(Path(__file__).parents[1] / "support"))

from result import print_result, script_parser
from server_processes import metric

from loong.model.tiny import tiny_model
from loong.runs.spawned_server import ServerConfig, spawn_server
from loong.workloads.report.report import table

NUM_LAYERS, NUM_WINDOW_LAYERS, WINDOW = 12, 10, 64
CONFIG = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": WINDOW,
    "layer_types": 2 * (5 * ["sliding_attention"] + ["full_attention"]),
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "tie_word_embeddings": True,
    "dtype": "float32",
    "bos_token_id": 256,
    "eos_token_id": [257, 259],
}


async def burst(url: str, load: Namespace) -> tuple[float, list[str]]:
    """Return the seconds of all requests, and their answers."""

    async def ask(number: int) -> str:
        random = Random(number)
        body = {
            "prompt": [random.randrange(256) for _ in range(load.prompt)],
            "max_tokens": load.answer,
            "temperature": 0,
            "ignore_eos": True,
        }
        answer = await client.post(f"{url}/v1/completions", json=body)
        answer.raise_for_status()
        text: str = answer.json()["choices"][0]["text"]
        return text

    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=1000)) as client:
        started = perf_counter()
        answers = await asyncio.gather(*map(ask, range(load.requests)))
        return perf_counter() - started, answers


def flags_of(load: Namespace, window_kv_tokens: int | None) -> tuple[str, ...]:
    """Return the flags of a server whose KV takes the memory of `load.pool` tokens in all layers."""
    common = ("--load-format", "dummy", "--max-num-batched-tokens", str(load.max_num_batched_tokens))
    if window_kv_tokens is None:
        return (*common, "--kv-cache-tokens", str(load.pool))
    rows = NUM_LAYERS * load.pool - NUM_WINDOW_LAYERS * window_kv_tokens
    others = rows // (NUM_LAYERS - NUM_WINDOW_LAYERS)
    return (*common, "--kv-cache-tokens", str(others), "--window-kv-tokens", str(window_kv_tokens))


def run_of(load: Namespace, model: Path, window_kv_tokens: int | None) -> dict[str, object]:
    """Return the numbers of a server."""
    config = ServerConfig(str(model), 1, 1, flags_of(load, window_kv_tokens), start_timeout=600.0)
    with spawn_server(config, "esp", model.parent / "server.log") as url:
        seconds, answers = asyncio.run(burst(url, load))
        return {
            "window_kv_tokens": window_kv_tokens,
            "kv_cache_tokens": metric(url, "loong:instance_kv_capacity_tokens"),
            "seconds": seconds,
            "num_dropped": metric(url, "loong:kv_window_dropped_tokens_total"),
            "num_preemptions": metric(url, "vllm:num_preemptions_total"),
            "answers": answers,
        }


def main() -> None:
    """Run both servers, round after round."""
    parser = script_parser("window_servers", __doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pool", type=int, default=3000, help="tokens of KV without the flag (%(default)s)")
    parser.add_argument("--window-kv-tokens", type=int, default=1500, help="of the flag (%(default)s)")
    parser.add_argument("--max-num-batched-tokens", type=int, default=256, help="of a step (%(default)s)")
    parser.add_argument("--requests", type=int, default=24, help="of a burst (%(default)s)")
    parser.add_argument("--prompt", type=int, default=900, help="tokens of a prompt (%(default)s)")
    parser.add_argument("--answer", type=int, default=100, help="tokens of an answer (%(default)s)")
    args = parser.parse_args()
    runs: dict[int | None, list[dict[str, object]]] = {None: [], args.window_kv_tokens: []}
    with TemporaryDirectory() as folder:
        model = tiny_model(Path(folder))
        (model / "config.json").write_text(json.dumps(CONFIG))
        for _ in range(args.rounds):
            for window_kv_tokens, found in runs.items():
                found.append(run_of(args, model, window_kv_tokens))
    first = runs[None][0]["answers"]
    assert isinstance(first, list)
    rows, kept = [], []
    for window_kv_tokens, found in runs.items():
        for run in found:
            answers = run.pop("answers")
            assert isinstance(answers, list)
            run["num_equal"] = sum(a == b for a, b in zip(answers, first, strict=True))
            kept.append(run)
        seconds = [float(str(run["seconds"])) for run in found]
        rows.append(
            (
                "-" if window_kv_tokens is None else f"{window_kv_tokens:,}",
                f"{found[0]['kv_cache_tokens']:,.0f}",
                f"{median(seconds):.1f}",
                f"{args.requests * args.answer / median(seconds):.0f}",
                f"{found[0]['num_dropped']:,.0f}",
                f"{min(int(str(run['num_equal'])) for run in found)} of {args.requests}",
            )
        )
    print(table(("window KV", "other KV", "seconds", "tokens/s", "dropped", "equal answers"), rows))
    print_result(
        "window_servers", {"command": shlex.join(["python", *sys.argv]), "runs": kept}, save=args.save
    )


if __name__ == "__main__":
    main()
