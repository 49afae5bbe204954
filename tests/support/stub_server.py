"""Stands in for `loong serve`: the same flags and pages, and answers made of thin air."""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from aiohttp import web

START = time.monotonic()


class Stub:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.num_batches = 0
        self.events: list[dict[str, object]] = []
        self.prompts: set[tuple[int, ...]] = set()

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.args.never_healthy else 200)

    async def models(self, request: web.Request) -> web.Response:
        model = {"id": "stub", "object": "model", "max_model_len": self.args.max_model_len}
        return web.json_response({"object": "list", "data": [model]})

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            text=f'loong:esp_group_size_bucket{{le="1.0"}} 0\nloong:esp_group_size_bucket{{le="2.0"}} '
            f'{self.num_batches}\nloong:esp_group_size_bucket{{le="+Inf"}} {self.num_batches}\n'
            f"loong:esp_scale_up_total {self.num_batches}\n"
        )

    async def trace(self, request: web.Request) -> web.Response:
        return web.json_response({"traceEvents": self.events})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        num_prompt_tokens, num_output_tokens = len(body["prompt"]), body["max_tokens"]
        response = web.StreamResponse()
        await response.prepare(request)
        self.num_batches += 1
        now = round((time.monotonic() - START) * 1e6)
        arguments = {"batch_id": self.num_batches, "group": [0, 1], "dop": 2, "phase": "prefill"}
        event = {"ph": "X", "cat": "batch", "name": "prefill", "ts": now, "dur": 900, "args": arguments}
        self.events += [{**event, "pid": 1, "tid": i} for i in (0, 1)]
        if self.args.fail_over and num_prompt_tokens > self.args.fail_over:
            await response.write(b'data: {"error": {"message": "stub is out of room"}}\n\n')
        if self.args.fail_again and tuple(body["prompt"]) in self.prompts:
            await response.write(b'data: {"error": {"message": "stub had this prompt before"}}\n\n')
        self.prompts.add(tuple(body["prompt"]))
        choice = {"text": "a", **({"token_ids": [97]} if body.get("return_token_ids") else {})}
        for _ in range(num_output_tokens):
            await response.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
        usage = {"prompt_tokens": num_prompt_tokens, "completion_tokens": num_output_tokens}
        await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


async def complete_like_lightllm(request: web.Request) -> web.StreamResponse:
    body = json.loads(await request.read())
    response = web.StreamResponse()
    await response.prepare(request)
    last = body["parameters"]["max_new_tokens"]
    for number in range(1, last + 1):
        token = {"text": "a", "prompt_tokens": len(body["inputs"]), "count_output_tokens": number}
        event = {"token": token, "finished": number == last}
        await response.write(f"data:{json.dumps(event)}\n\n".encode())
    return response


async def serve(stub: Stub, port: int) -> None:
    app = web.Application(client_max_size=2**26)
    app.router.add_get("/health", stub.health)
    app.router.add_get("/v1/models", stub.models)
    app.router.add_get("/metrics", stub.metrics)
    app.router.add_get("/trace", stub.trace)
    app.router.add_post("/v1/completions", stub.complete)
    app.router.add_post("/generate_stream", complete_like_lightllm)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    parser.add_argument("--policy", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--num-instances", type=int)
    parser.add_argument("--tensor-parallel-size", type=int)
    for target in ("--target-ttft", "--target-tpot", "--ttft-factor"):
        parser.add_argument(target, type=float)
    parser.add_argument("--decision-log", type=Path, help="has nothing to write there")
    parser.add_argument("--max-model-len", type=int, default=1_000_000)
    # A benchmark refuses flags that `loong serve` does not have, so these come by the environment.
    fail_over = int(os.environ.get("STUB_FAIL_OVER", 0))
    parser.set_defaults(fail_over=fail_over)  # requests with longer prompts fail; 0 fails none
    parser.set_defaults(fail_again="STUB_FAIL_AGAIN" in os.environ)  # prompts that come twice fail
    parser.add_argument("--never-healthy", action="store_true")
    parser.add_argument("--ignore-sigterm", action="store_true")
    parser.add_argument("--hold", type=Path, help="keep this FIFO open, here and in a child that never ends")
    args = parser.parse_args()
    if os.environ.get("STUB_FAIL_TO_START_AS") == args.policy:
        sys.exit("no such model: stub")
    if args.ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if args.hold is not None:
        fifo = os.open(args.hold, os.O_WRONLY)
        subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], pass_fds=[fifo])
    asyncio.run(serve(Stub(args), args.port))


if __name__ == "__main__":
    main()
