"""Plays a newcomer's first ten minutes, and shows each step with its output.

Typed commands are shown after a `$`; the other steps are done in Python. The built-in model writes random
text. Needs no GPU and downloads nothing, but for --install, which makes a fresh environment out of this
checkout. Exits with 1 if any step did not do what it should.
"""

import argparse
import asyncio
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import indent, wrap

import httpx
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from loong.model.tiny import tiny_model
from loong.runs.spawned_server import ENTRY, ServerConfig, spawn_server

FIRST_LINES, LAST_LINES = 7, 8  # shown of a step's output
MAX_WIDTH = 150
MAX_WRAPPED = 4  # lines that one may take
STEP_SECONDS = 600.0
DECISIONS = "decisions.jsonl"
MAX_MODEL_ERROR = 0.25  # of the predicted times of a phase, on a machine that does nothing else
LONG_PROMPT, SHORT_PROMPT = 6000, 20


class Story:
    """Steps, shown as they are done."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.failed: list[str] = []
        self.last = ""  # output of a command

    def run(self, command: str, check: Callable[[int, str], bool], typed: str = "") -> None:
        """Run a command as if it were typed; `check` says of its code and output whether they are right."""
        loong = [sys.executable, "-c", ENTRY]
        words = shlex.split(command)
        finished = subprocess.run(
            [*loong, *words[1:]] if words[0] == "loong" else words,
            input=typed, capture_output=True, text=True, cwd=self.folder, timeout=STEP_SECONDS, check=False,
        )  # fmt: skip
        output = self.last = finished.stdout + finished.stderr
        self.report(f"$ {command}", output, is_right=check(finished.returncode, output))

    def report(self, what: str, output: str, *, is_right: bool) -> None:
        """Show a step, and remember it if it went wrong."""
        print(f"\n{what}")
        lines = output.strip().splitlines()
        left_out = len(lines) - FIRST_LINES - LAST_LINES
        if left_out > 1:
            lines[FIRST_LINES:-LAST_LINES] = [f"... {left_out} more lines ..."]
        for line in lines:
            print(indent("\n".join(wrap(line, MAX_WIDTH, max_lines=MAX_WRAPPED, placeholder=" ...")), "    "))
        print("    => as it should be" if is_right else "    => WRONG", flush=True)
        if not is_right:
            self.failed.append(what)


def install(story: Story) -> None:
    """Install into a fresh environment, without CUDA."""
    checkout = Path(__file__).resolve().parents[2]
    for command in (
        f"{sys.executable} -m venv fresh",
        f"fresh/bin/python -m pip install --quiet -c {checkout}/constraints.txt {checkout}",
        "fresh/bin/loong --version",
    ):
        story.run(command, lambda code, _output: code == 0)


def ask(story: Story, url: str) -> None:
    """Ask by curl and by the official client: at once, streamed, and stopped half way."""
    body = json.dumps({"prompt": "hello", "max_tokens": 16})
    story.run(
        f"curl -s {url}/v1/completions -H 'Content-Type: application/json' -d '{body}'",
        lambda _code, output: json.loads(output)["usage"]["completion_tokens"] > 0,
    )
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    answer = client.chat.completions.create(
        model="loong-tiny", messages=[{"role": "user", "content": "hello"}], max_tokens=16
    )
    text = answer.choices[0].message.content or ""
    story.report("The openai client asks 'hello', and gets", repr(text), is_right=bool(text))
    stream = client.completions.create(model="loong-tiny", prompt="hello", max_tokens=2000, stream=True)
    pieces = [next(stream).choices[0].text for _ in range(5)]
    stream.close()
    reported = f"{pieces!r}; 2,000 tokens were asked for, and a moment later the server holds no KV"
    story.report(
        "The openai client streams, and goes after five pieces", reported, is_right=is_idle_soon(url)
    )
    story.run(
        f"loong chat --base-url {url} --max-tokens 8",
        lambda code, output: code == 0 and bool(output),
        "hello",
    )


def is_idle_soon(url: str) -> bool:
    """Return whether the server aborts a stream within a few seconds after its client has gone."""
    for _ in range(50):
        if metric(url, "loong:instance_kv_tokens") == 0:
            return True
        time.sleep(0.1)
    return False


def metric(url: str, name: str) -> float:
    """Return the sum of a metric's samples."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)


def model_errors(url: str) -> dict[str, float]:
    """Return the mean error of predicted batch times by phase; 1 is twice or half as long."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    return {
        sample.labels["phase"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == "loong:cost_model_relative_error"
    }


def measure(story: Story, url: str) -> None:
    """Run our load generator and its pictures, then check the metrics."""
    story.run(
        f"loong bench --base-url {url} --workload mixed --length-scale 1/64 --num-requests 40 "
        "--request-rate 10 --output-dir run",
        lambda code, _output: code == 0 and (story.folder / "run" / "results.json").is_file(),
    )
    story.run("loong plot run", lambda code, _output: code == 0 and any(story.folder.glob("run/*.html")))
    names = ("vllm:request_success_total", "vllm:generation_tokens_total", "loong:esp_group_size_count")
    values = {name: metric(url, name) for name in names}
    reported = "\n".join(f"{name} {value:g}" for name, value in values.items())
    story.report(f"$ curl {url}/metrics   (of which)", reported, is_right=min(values.values()) > 0)
    errors = model_errors(url)
    reported = "\n".join(f"{phase} batches: {error:.0%}" for phase, error in errors.items())
    is_right = max(errors.values()) < MAX_MODEL_ERROR
    story.report("The dashboard shows how far the cost model is off", reported, is_right=is_right)


def guidellm(story: Story, url: str, program: str) -> None:
    """Run an unmodified load generator of others."""
    tokenizer = tiny_model(story.folder)
    story.run(
        f"{program} run --backend kind=openai_http,target={url} --profile kind=constant,rate=3 "
        f"--constraint kind=max_duration,seconds=8 --tokenizer kind=huggingface_auto,model={tokenizer} "
        "--data kind=synthetic_text,prompt_tokens=64,output_tokens=16 --disable-progress "
        "--output kind=console",
        lambda code, output: code == 0 and "Benchmarking complete" in output,
    )


def trace(story: Story, url: str) -> None:
    """Check a trace in which a group grows for a long prompt, and shrinks after it."""
    for length in (SHORT_PROMPT, LONG_PROMPT, SHORT_PROMPT):
        body = {"prompt": [5] * length, "max_tokens": 8, "ignore_eos": True}
        httpx.post(f"{url}/v1/completions", json=body, timeout=STEP_SECONDS).raise_for_status()
    path = story.folder / "trace.json"
    path.write_bytes(httpx.get(f"{url}/trace").content)
    events = json.loads(path.read_text())["traceEvents"]
    dops = [e["args"]["dop"] for e in sorted(events, key=lambda e: e.get("ts", 0)) if e.get("cat") == "batch"]
    reported = (
        f"{len(events)} events for Perfetto; batches ran on these numbers of instances: {changes(dops)}"
    )
    has_both = any(a < b for a, b in pairwise(dops)) and any(a > b for a, b in pairwise(dops))
    sent = f"after prompts of {SHORT_PROMPT}, {LONG_PROMPT:,} and {SHORT_PROMPT} tokens"
    story.report(f"$ curl {url}/trace > trace.json   ({sent})", reported, is_right=has_both)
    page = httpx.get(f"{url}/dashboard")
    story.report(f"A browser opens {url}/dashboard", page.text.splitlines()[0], is_right=page.is_success)


def changes(values: list[int]) -> list[int]:
    """Return the values without those that equal the one before."""
    return [value for i, value in enumerate(values) if i == 0 or values[i - 1] != value]


def look_back(story: Story) -> None:
    """Explain the scheduler's decisions, and simulate eight H200s."""
    story.run(f"loong explain {DECISIONS}", lambda code, output: code == 0 and "most delayed first" in output)
    slowest = story.last.splitlines()[3].split()[0]
    story.run(
        f"loong explain {DECISIONS} --request {slowest}",
        lambda code, output: code == 0 and "Its first token" in output,
    )
    story.run(
        "loong simulate --workload mixed --policy esp,chunked --rate 0.5,1 --num-requests 60",
        lambda code, output: code == 0 and "P90 goodput" in output,
    )


def mistakes(story: Story, url: str) -> None:
    """Try a wrong flag, a wrong value, and a prompt that is too long."""

    def is_one_line(word: str) -> Callable[[int, str], bool]:
        return lambda code, output: code != 0 and len(output.strip().splitlines()) == 1 and word in output

    story.run("loong serve --num-instence 2", is_one_line("--num-instances"))
    story.run("loong serv", is_one_line("serve"))
    story.run("loong serve --policy fastest", is_one_line("esp"))
    story.run("loong chat --base-url http://127.0.0.1:9", is_one_line("Connection refused"))
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": [5] * 10**5, "max_tokens": 1})
    reported = answer.json()["error"]["message"]
    story.report(
        "A prompt of 100,000 tokens is sent",
        f"{answer.status_code}: {reported}",
        is_right="100000" in reported,
    )


async def overfill(story: Story, url: str) -> None:
    """Send more requests than may wait."""
    async with httpx.AsyncClient(base_url=url, timeout=STEP_SECONDS) as client:
        body = {"prompt": [5] * 2000, "max_tokens": 4}
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(24)))
    refused = [answer for answer in answers if answer.status_code in (429, 503)]
    reported = f"{len(answers) - len(refused)} are served, {len(refused)} refused"
    if refused:
        reported += f": {refused[0].status_code}, Retry-After {refused[0].headers['Retry-After']}, "
        reported += refused[0].json()["error"]["message"]
    story.report(
        "24 prompts are sent at once, of which 2 may wait", reported, is_right=0 < len(refused) < len(answers)
    )


@contextmanager
def served(story: Story, *arguments: str) -> Iterator[str]:
    """Run `loong serve`, and print how long it takes until it answers."""
    config = ServerConfig(None, 4, 1, ("--kv-cache-tokens", "4096", *arguments), start_timeout=120.0)
    log, start = story.folder / "server.log", time.monotonic()
    with spawn_server(config, "esp", log) as url:
        took = f"\n(answers after {time.monotonic() - start:.1f} s)"
        command = shlex.join(["loong", *config.arguments("esp")])
        story.report(f"$ {command}", log.read_text() + took, is_right=True)
        yield url
    lines = log.read_text().splitlines()
    story.report("Ctrl-C", "\n".join(lines[-2:]), is_right=lines[-1].endswith("stopped"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--install",
        action="store_true",
        help="begin by installing into a fresh environment, which takes minutes",
    )
    parser.add_argument("--guidellm", metavar="PROGRAM", help="program of GuideLLM, version 0.8 (none)")
    args = parser.parse_args()
    with TemporaryDirectory(prefix="first-ten-minutes-") as folder:
        story, start = Story(Path(folder)), time.monotonic()
        if args.install:
            install(story)
        with served(story, "--decision-log", str(story.folder / DECISIONS)) as url:
            ask(story, url)
            trace(story, url)
            measure(story, url)
            if args.guidellm:
                guidellm(story, url, args.guidellm)
            mistakes(story, url)
        look_back(story)
        with served(story, "--max-waiting-requests", "2") as url:
            asyncio.run(overfill(story, url))
    minutes = (time.monotonic() - start) / 60
    print(f"\n{minutes:.1f} minutes; {len(story.failed)} steps went wrong: {story.failed or 'none'}")
    raise SystemExit(1 if story.failed else 0)


if __name__ == "__main__":
    main()
