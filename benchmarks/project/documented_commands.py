"""Runs every command of README and docs in a fresh folder a page, and shows exit codes.

Commands are the lines of fenced bash blocks. A server of the built-in model takes the place of each that a
page names. `NOT_RUN` lists commands that need something else, `SHORTENED` those that are cut short. Exits
with 1 if any command fails.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from loong.model.tiny import tiny_model
from loong.runs.spawned_server import ServerConfig, spawn_server
from loong.workloads.report.report import table

ROOT = Path(__file__).resolve().parents[2]
COMMAND_SECONDS = 900.0
READY = re.compile(r"serving \S+ on (http://\S+)")
# Anything that listens in a page's examples, except the address of `loong serve` itself.
SERVER = re.compile(r"(?:http://)?(?:localhost|a|b|gpu-7):800\d")

NOT_RUN = (  # patterns of commands, and the missing thing that they need
    (r"--device cuda|benchmarks/evaluation/reality\.py|plot out/mixed", "GPUs"),
    (r"smollm2|SmolLM2|ORG/NAME|-m download|Llama-3\.1|llama-3\.1-8b --load", "a model that is fetched"),
    (r"^(vllm|python -m (sglang|lightllm))|vllm=|sglang=|lightllm", "another engine"),
    (r"^(git clone|pip install|python3\.11 -m venv|\. \.venv)", "an installation"),
    (r"^make ", "the checkout itself; they are tests of their own"),
    (r"benchmarks/\w+/\w+\.py|^schemathesis", "minutes to hours, or other tools: see benchmarks/README.md"),
    (r"^loong simulate --cost-model cost-model\.json", "a profile of GPUs"),
    (r"AzureLLMInferenceTrace", "a published trace"),
    (r"completion zsh", "zsh"),
)
SHORTENED = (  # the same command, for less time
    (r"--repeat 3", "--repeat 1 --num-requests 20"),
    (r"--request-rate (4:12:4|2:8:2|1,2,4)", "--request-rate 4 --num-requests 20"),
    (r"--rate 0\.5:[24]:0\.5", "--rate 0.5 --num-requests 40"),
    (r"--rate 20:200:20", "--rate 20 --num-requests 40"),
    (r"--find-goodput --per-class", "--find-goodput 4 --per-class --num-requests 60"),
    (r"--find-goodput(?! 4)", "--find-goodput 4 --num-requests 5"),
    (r"--goodput --slo tight --slo loongserve-12", "--goodput 1 --num-requests 20 --slo tight"),
    (r"trace:mixed\.jsonl --num-requests 500", "trace:mixed.jsonl --num-requests 50"),
    (r"--length-scale 1/8", "--length-scale 1/64"),
    (r"(trace:azure\.csv@replay\(2\))' --policy", r"\1' --num-requests 40 --policy"),
    (r"--num-instances 8 --model \./my-model", "--num-instances 2 --model ./my-model --num-requests 20"),
)
FIRST_ID = "grep -o 'cmpl-[0-9a-f]*' | head -1"
REPLACED = (  # parts that only a reader can fill in
    (
        r"^(loong explain.*?) --request cmpl-\w+",
        r"\1 --request $(\1 --json | grep -o 'cmpl-[0-9a-f]*' | head -1)",
    ),
    (r"^loong chat", "echo hello | loong chat"),
    (r"^(echo .*\| )echo hello \| ", r"\1"),
)
EXPECTED = ((r'"max_tokens": 0', 22),)  # codes of commands that show how a request is refused
SIMULATED = "loong simulate --workload leval --rate 5 --num-requests 20"
LOGGED = "--decision-log decisions.jsonl"
PREPARED = {  # things that a page assumes, made before
    "docs/command-line.md": (
        "echo 'num-instances: 2' > serve.yaml",
        f"{SIMULATED} --policy esp --event-log events.jsonl {LOGGED} --output-dir monday",
        f"{SIMULATED} --policy tp --output-dir tuesday",
        "cp decisions.jsonl decisions-static-sp.jsonl",
    ),
    "docs/reports.md": (
        "loong bench --base-url http://localhost:8000 --length-scale 1/64 --num-requests 20 --output-dir run",
        "cp -r run monday && cp -r run tuesday && cp -r run measured && cp run/results.json measured",
        f"{SIMULATED} --policy esp {LOGGED} --output-dir virtual",
    ),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """A command of a page, and its exit code, or the reason why it was not run."""

    page: str
    command: str
    code: int | None
    seconds: float = 0.0
    why: str = ""
    output: str = ""

    @property
    def is_failed(self) -> bool:
        """Return whether it ended otherwise than the page says."""
        expected = next((code for pattern, code in EXPECTED if re.search(pattern, self.command)), 0)
        return self.code is not None and self.code != expected


def commands_of(page: Path) -> list[str]:
    """Return the commands of a page's fenced bash blocks, with continued lines in one."""
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    commands = []
    for block in blocks:
        command = ""
        for line in block.splitlines():
            command += re.sub(r"\s+#\s.*$", "", f" {line}").strip("\n").removeprefix(" ")
            is_continued = command.endswith("\\") or command.count("'") % 2 == 1
            command = command.removesuffix("\\") + ("\n" if command.count("'") % 2 == 1 else "")
            if not is_continued:
                if command.strip() and not command.startswith("#"):
                    commands.append(command.strip())
                command = ""
    return commands


def run_page(page: Path) -> Iterator[Outcome]:
    """Run the commands of a page in a fresh folder, in their order, with a server of their own."""
    name = str(page.relative_to(ROOT))
    with fresh_folder() as folder, served() as url:
        for prepared in PREPARED.get(name, ()):
            run_typed(prepared, folder, url).check_returncode()
        for typed in commands_of(page):
            if why := next((why for pattern, why in NOT_RUN if re.search(pattern, typed)), None):
                yield Outcome(name, typed, None, why=why)
                continue
            command = typed
            for pattern, shorter in (*SHORTENED, *REPLACED):
                command = re.sub(pattern, shorter, command)
            start = time.monotonic()
            is_server = command.startswith("loong serve")
            ended = (serve_typed if is_server else run_typed)(command, folder, url)
            yield Outcome(
                name, typed, ended.returncode, time.monotonic() - start, output=ended.stdout[-2000:]
            )


def run_typed(command: str, folder: Path, url: str) -> subprocess.CompletedProcess[str]:
    """Run a command in bash to its end, with the server at `url` for each that it names."""
    command = re.sub(r"^(curl )", r"\1--fail --silent --show-error ", command)
    command = SERVER.sub(url, command)
    if "loong chat" in command and "--base-url" not in command:
        command += f" --base-url {url}"
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=COMMAND_SECONDS,
        check=False,
    )


def serve_typed(command: str, folder: Path, _url: str) -> subprocess.CompletedProcess[str]:
    """Start a server on a free port, send it a request once it is up, and end it as Ctrl-C would."""
    command = re.sub(r" --port \d+", "", command) + " --port 0"
    output = ""
    with subprocess.Popen(
        ["bash", "-c", f"exec {command}"],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            output += line
            if found := READY.search(line):
                body = '{"prompt": "hello", "max_tokens": 4}'
                ask = f"curl {found[1]}/v1/completions -H 'Content-Type: application/json' -d '{body}'"
                run_typed(ask, folder, found[1]).check_returncode()
                process.send_signal(2)
    return subprocess.CompletedProcess(command, process.returncode, output)


def environment() -> dict[str, str]:
    """Return this process's variables, with the `loong` of this interpreter first in the path."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


@contextmanager
def served() -> Iterator[str]:
    """Yield the URL of a server of the built-in model."""
    with TemporaryDirectory(prefix="documented-commands-") as folder:
        config = ServerConfig(None, 4, 1, ("--trace-dir", f"{folder}/traces"), start_timeout=120.0)
        with spawn_server(config, "esp", Path(folder) / "server.log") as url:
            yield url


@contextmanager
def fresh_folder() -> Iterator[Path]:
    """Yield a folder with a reader's files: a model, a trace, and the docs."""
    with TemporaryDirectory(prefix="documented-commands-") as text:
        folder = Path(text)
        shutil.copytree(ROOT / "docs", folder / "docs")
        for model in ("my-llama", "my-model"):
            shutil.copytree(tiny_model(Path.home() / ".cache" / "loong"), folder / model)
        rows = [f"2023-11-16 18:01:{second:02}.0000000,{400 + 90 * second},8" for second in range(50)]
        (folder / "azure.csv").write_text(
            "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n"
        )
        yield folder


def pages() -> list[Path]:
    """Return README and the pages of docs."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def main() -> None:
    """Run the commands of all pages, or of those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "pages", nargs="*", type=Path, help="pages to run, such as README.md docs/api.md (all)"
    )
    parser.add_argument("--list", action="store_true", help="only list the commands that would run")
    args = parser.parse_args()
    chosen = [page.resolve() for page in args.pages] or pages()
    if args.list:
        for page in chosen:
            print(*(f"{page.name}: {command}" for command in commands_of(page)), sep="\n")
        return
    outcomes: list[Outcome] = []
    for page in chosen:
        for outcome in run_page(page):
            outcomes.append(outcome)
            code = "-" if outcome.code is None else outcome.code
            print(f"{code:>4}  {outcome.seconds:6.1f} s  {outcome.page}: {outcome.command}", flush=True)
            if outcome.is_failed:
                print(outcome.output, flush=True)
    failed = [outcome for outcome in outcomes if outcome.is_failed]
    reasons = sorted({outcome.why for outcome in outcomes if outcome.why})
    rows = [(why, str(sum(outcome.why == why for outcome in outcomes))) for why in reasons]
    num_run = sum(outcome.code is not None for outcome in outcomes)
    print(f"\n{num_run} commands were run, {len(failed)} failed\n")
    print(table(("not run, as they need", "commands"), rows))
    print(json.dumps({"run": num_run, "failed": [f"{o.page}: {o.command}" for o in failed]}))
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
