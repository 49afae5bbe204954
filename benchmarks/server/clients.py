"""Shows that other clients work with loong unchanged: openai, LangChain's, LiteLLM, agents, LightLLM's.

They live in a separate environment, made on first use (--environment; from the package index), because they
are large and loong does not need them. Prints a line a step, and as its last line a JSON object. Exits with 1
if any step did not do what it should.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import traceback
import venv
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import urlopen

from client_agents import of_agents, of_langchain_tools, of_lightllm, of_litellm_tools, of_openai_tools

PACKAGES = ("openai==3.57.0", "langchain-openai==1.7.4", "litellm==1.110.2", "openai-agents==0.24.0")
MESSAGES = [{"role": "user", "content": "Say something."}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--environment",
        type=Path,
        default=Path("clients-environment"),
        metavar="DIR",
        help="folder of the clients' environment, made if missing (%(default)s)",
    )
    parser.add_argument(
        "--model", metavar="MODEL", help="model to serve, as for `loong serve` (a tiny random one)"
    )
    parser.add_argument("--base-url", metavar="URL", help="run the clients against this server")
    parser.add_argument(
        "--only", default="", metavar="NAME", help="run only steps whose names begin with this (all)"
    )
    args = parser.parse_args()
    sys.exit(act(args.base_url, args.only) if args.base_url else serve_and_act(args.environment, args.model))


def serve_and_act(environment: Path, model: str | None) -> int:
    """Run this file once more in the clients' environment, with a server."""
    from loong.runs.spawned_server import ServerConfig, spawn_server  # which clients do not have

    python = environment / "bin" / "python"
    if not python.exists():
        print(f"making {environment} with {', '.join(PACKAGES)}", flush=True)
        venv.create(environment, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    config = ServerConfig(model, 2, 1, ("--kv-cache-tokens", "8192"), start_timeout=120.0)
    with TemporaryDirectory() as folder, spawn_server(config, "esp", Path(folder) / "log") as url:
        return subprocess.run([python, __file__, "--base-url", url], check=False).returncode


class Acts:
    """The steps, and their outcomes."""

    def __init__(self) -> None:
        self.outcomes: dict[str, bool] = {}

    def act(self, name: str, call: Callable[[], object]) -> None:
        """Do one step, and show its result or its error."""
        try:
            reported, is_right = repr(call()), True
        except Exception as error:  # noqa: BLE001  whatever a client may raise
            traceback.print_exc()
            reported, is_right = f"{type(error).__name__}: {error}", False
        self.outcomes[name] = is_right
        print(f"{'ok   ' if is_right else 'WRONG'} {name}: {reported[:90]}", flush=True)


def act(base_url: str, only: str) -> int:
    acts = Acts()
    with urlopen(f"{base_url}/v1/models") as answer:
        model = json.load(answer)["data"][0]["id"]
    for steps in STEPS:
        for name, call in steps(f"{base_url}/v1", model).items():
            if name.startswith(only):
                acts.act(name, call)
    names = [package.partition("==")[0] for package in PACKAGES]
    versions = {name: version(name) for name in names}
    print(json.dumps({"versions": versions, "right": acts.outcomes}))
    return 0 if all(acts.outcomes.values()) else 1


def rating() -> Any:
    """Return the type of structured answers, which even a model of random text completes soon."""
    from typing import Literal

    from pydantic import BaseModel, Field

    class Rating(BaseModel):
        mood: Literal["happy", "sad"]
        stars: int = Field(ge=1, le=5)
        tags: list[Literal["short", "long"]] = Field(max_length=2)

    return Rating


def of_openai(url: str, name: str) -> dict[str, Callable[[], object]]:
    from openai import AsyncOpenAI, NotFoundError, OpenAI

    client = OpenAI(base_url=url, api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": name, "messages": MESSAGES, "max_tokens": 12, "temperature": 0}

    def streamed() -> str:
        chunks = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

    def stopped() -> str:
        stream = client.chat.completions.create(**asked | {"max_tokens": 2000}, stream=True)
        for number, _ in enumerate(stream):
            if number == 5:
                stream.close()
                break
        return "left after 5 chunks"

    async def at_once() -> list[str | None]:
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as many:
            answers = await asyncio.gather(*(many.chat.completions.create(**asked) for _ in range(8)))
        return [answer.choices[0].message.content for answer in answers]

    async def streamed_at_once() -> int:
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as one:
            stream = await one.chat.completions.create(**asked, stream=True)
            return len([chunk async for chunk in stream])

    def parsed() -> object:
        answer = client.chat.completions.parse(**asked | {"max_tokens": 200}, response_format=rating())
        return answer.choices[0].message.parsed

    def parsed_as_streamed() -> object:
        given = asked | {"max_tokens": 200, "response_format": rating()}
        with client.chat.completions.stream(**given) as stream:
            return stream.get_final_completion().choices[0].message.parsed

    def refused() -> str:
        try:
            client.embeddings.create(model=name, input="a")
        except NotFoundError as error:
            return str(error)
        raise AssertionError("embeddings were answered")

    def same() -> bool:
        whole = client.chat.completions.create(**asked).choices[0].message.content
        assert whole == streamed()
        return True

    return {
        "openai: a chat": lambda: client.chat.completions.create(**asked).choices[0].message.content,
        "openai: a chat, streamed": streamed,
        "openai: both the same": same,
        "openai: a stream that is left": stopped,
        "openai: eight chats at once, async": lambda: asyncio.run(at_once()),
        "openai: a stream, async": lambda: asyncio.run(streamed_at_once()),
        "openai: three choices with logprobs": lambda: [
            len(choice.logprobs.content)
            for choice in client.chat.completions.create(**asked, n=3, logprobs=True, top_logprobs=2).choices
        ],
        "openai: completions of two prompts": lambda: [
            choice.text
            for choice in client.completions.create(model=name, prompt=["a", "b"], max_tokens=8).choices
        ],
        "openai: .parse": parsed,
        "openai: .parse, streamed": parsed_as_streamed,
        "openai: models": lambda: [model.id for model in client.models.list()],
        "openai: embeddings are refused": refused,
    }


def of_langchain(url: str, name: str) -> dict[str, Callable[[], object]]:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=name, base_url=url, api_key="none", max_retries=0, max_tokens=12, temperature=0)
    long = ChatOpenAI(model=name, base_url=url, api_key="none", max_retries=0, max_tokens=200)

    async def streamed() -> int:
        return len([chunk async for chunk in model.astream("Say something.")])

    def counted() -> object:
        usage = model.invoke("Say something.").usage_metadata
        assert usage["output_tokens"] > 0
        return usage

    return {
        "langchain: invoke": lambda: model.invoke("Say something.").content,
        "langchain: a conversation": lambda: model.invoke([("system", "Be nice."), ("human", "Hi.")]).content,
        "langchain: usage": counted,
        "langchain: stream": lambda: "".join(chunk.content for chunk in model.stream("Say something.")),
        "langchain: astream": lambda: asyncio.run(streamed()),
        "langchain: batch": lambda: [answer.content for answer in model.batch(["a", "b", "c"])],
        "langchain: structured output": lambda: long.with_structured_output(rating()).invoke("How was it?"),
    }


def of_litellm(url: str, model: str) -> dict[str, Callable[[], object]]:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network for prices
    import litellm

    asked: dict[str, Any] = {
        "api_base": url, "api_key": "none", "max_tokens": 12, "temperature": 0, "messages": MESSAGES
    }  # fmt: skip
    name = f"hosted_vllm/{model}"

    def text(answer: Any) -> str:
        reported: str = answer.choices[0].message.content
        return reported

    def streamed() -> str:
        chunks = litellm.completion(model=name, stream=True, **asked)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    def structured() -> object:
        answer = litellm.completion(model=name, response_format=rating(), **asked | {"max_tokens": 200})
        return rating().model_validate_json(text(answer))

    return {
        "litellm: completion": lambda: text(litellm.completion(model=name, **asked)),
        "litellm: as an OpenAI model": lambda: text(litellm.completion(model=f"openai/{model}", **asked)),
        "litellm: stream": streamed,
        "litellm: acompletion": lambda: text(asyncio.run(litellm.acompletion(model=name, **asked))),
        "litellm: structured output": structured,
    }


STEPS = (
    *(of_openai, of_openai_tools, of_langchain, of_langchain_tools, of_litellm, of_litellm_tools),
    *(of_agents, of_lightllm),
)

if __name__ == "__main__":
    main()
