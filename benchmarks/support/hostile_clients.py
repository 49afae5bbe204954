"""Clients that do a server harm if it lets them, and the death of its helper processes."""

import asyncio
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from threading import Thread
from typing import TypeAlias

import aiohttp
from server_processes import processes_of

PAUSE_SECONDS = 1.0  # between two acts of one kind
HOLD_SECONDS = 20.0  # of a connection that is not used as it should be
_BOMB = 'root ::= [b-wyz0-9A-Z] [a-z]* | "a" S\nS ::= S S S | S S | "x" | ""'
_LONG = {"prompt": "x", "max_tokens": 400, "stream": True, "ignore_eos": True}
_MALFORMED = (
    b"{",
    b"[" * 100_000,
    b'{"prompt": ' + b'"' + b"a" * 2_000_000 + b'"}',
    b'{"prompt": [1e308, -1, null], "max_tokens": "many"}',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "logit_bias": {"-1": 1e999}}',
    b"\xff\xfe\x00",
    json.dumps({"messages": [{"role": "user", "content": "hi"}] * 5000, "max_tokens": 1}).encode(),
)

Act: TypeAlias = Callable[["HostileClients"], Awaitable[None]]


class HostileClients:
    """Clients of these kinds in a thread of their own, each of which acts again and again."""

    def __init__(self, url: str, pid: int, kinds: list[str]) -> None:
        """`pid` is that of the server's first process."""
        self.url, self.pid = url, pid
        self.counts = Counter[str]()
        self._kinds = kinds
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_until_complete, args=(self._run(),), daemon=True)

    def __enter__(self) -> "HostileClients":
        self._over = asyncio.Event()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    async def _run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=300.0)
        async with aiohttp.ClientSession(self.url, timeout=timeout) as self.session:
            tasks = [asyncio.create_task(self._act(kind)) for kind in self._kinds]
            await self._over.wait()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _act(self, kind: str) -> None:
        while True:
            with suppress(aiohttp.ClientError, OSError, TimeoutError):  # what it provokes
                await KINDS[kind](self)
            self.counts[kind] += 1
            await asyncio.sleep(PAUSE_SECONDS)

    async def post(self, body: Mapping[str, object]) -> None:
        """Send a request, and count its status."""
        async with self.session.post("/v1/completions", json=body) as answer:
            self.counts[f"status {answer.status}"] += 1
            await answer.read()


async def _abort(clients: HostileClients) -> None:
    async with clients.session.post("/v1/completions", json={**_LONG, "n": random.choice((1, 3))}) as answer:
        for _ in range(random.randrange(5)):
            await answer.content.readany()


async def _never_read(clients: HostileClients) -> None:
    async with clients.session.post("/v1/completions", json=_LONG):
        await asyncio.sleep(HOLD_SECONDS)


async def _malformed(clients: HostileClients) -> None:
    path = random.choice(("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize"))
    headers = {"Content-Type": "application/json"}
    async with clients.session.post(path, data=random.choice(_MALFORMED), headers=headers) as answer:
        clients.counts[f"status {answer.status}"] += 1
        await answer.read()


async def _drip(clients: HostileClients) -> None:
    host, port = clients.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    for byte in b"POST /v1/completions HTTP/1.1\r\n":
        writer.write(bytes([byte]))
        await asyncio.sleep(HOLD_SECONDS / 30)
    writer.close()


async def _extreme(clients: HostileClients) -> None:
    given = {"prompt": "x", "max_tokens": 8, "priority": random.choice((-(2**31), 2**31 - 1))}
    await clients.post({**given, "slo": {"ttft": 1e-9, "tpot": 1e-9}, "temperature": 2.0, "top_k": 1})


async def _grammar(clients: HostileClients) -> None:
    bias = {"logit_bias": {str(ord(letter)): 90 for letter in "ax"}}
    await clients.post({"prompt": "x", "max_tokens": 3000, "structured_outputs": {"grammar": _BOMB}, **bias})


async def _kill_helper(clients: HostileClients) -> None:
    """Kill a fork server of workers, or a process that tries grammars or writes prompts."""
    await asyncio.sleep(HOLD_SECONDS)
    _, *others = await asyncio.to_thread(processes_of, clients.pid)
    helpers = [use for use in others if use.name != "loong-forked" and not use.name.startswith("loong-w")]
    if helpers:
        with suppress(ProcessLookupError):
            os.kill(random.choice(helpers).pid, signal.SIGKILL)


KINDS: Mapping[str, Act] = {
    "abort": _abort,
    "never-read": _never_read,
    "malformed": _malformed,
    "drip": _drip,
    "extreme": _extreme,
    "grammar": _grammar,
    "kill-helper": _kill_helper,
}
