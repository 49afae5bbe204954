"""Steps of `clients.py` with tools and agents: openai, LangChain's, LiteLLM's and OpenAI's Agents SDK."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, Literal

City = Literal["Paris", "Oslo"]
QUESTION = "How is the weather in Paris?"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Return the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def weather(city: City) -> str:
    """Return the weather of a city."""
    return f"It rains in {city}."


def checked(name: str, arguments: str) -> str:
    """Return a call as text; raise if it is not one of `weather`."""
    city = json.loads(arguments)["city"]
    if name != "weather" or city not in ("Paris", "Oslo"):
        raise ValueError(f"{name}({arguments}) is no call of weather")
    return f"{name}({city})"


def of_openai_tools(url: str, model: str) -> dict[str, Callable[[], object]]:
    from openai import OpenAI

    client: Any = OpenAI(base_url=url, api_key="none", max_retries=0)  # unions of many types
    asked: dict[str, Any] = {"model": model, "tools": [WEATHER], "max_tokens": 100, "temperature": 0}
    forced = asked | {"tool_choice": "required", "parallel_tool_calls": False}

    def called() -> str:
        message = client.chat.completions.create(messages=MESSAGES, **forced).choices[0].message
        (call,) = message.tool_calls
        return checked(call.function.name, call.function.arguments)

    def streamed() -> str:
        with client.chat.completions.stream(messages=MESSAGES, **forced) as stream:
            (call,) = stream.get_final_completion().choices[0].message.tool_calls
        return checked(call.function.name, call.function.arguments)

    def answered() -> object:
        message = client.chat.completions.create(messages=MESSAGES, **forced).choices[0].message
        (call,) = message.tool_calls
        result = weather(**json.loads(call.function.arguments))
        turns = [*MESSAGES, message, {"role": "tool", "tool_call_id": call.id, "content": result}]
        answer = client.chat.completions.create(messages=turns, **asked | {"max_tokens": 24})
        return answer.choices[0].message.content

    return {
        "openai: a forced tool call": called,
        "openai: a forced tool call, streamed": streamed,
        "openai: an answer after a tool's result": answered,
    }


def of_langchain_tools(url: str, model: str) -> dict[str, Callable[[], object]]:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model=model, base_url=url, api_key="none", max_retries=0, max_tokens=100, temperature=0)
    function = tool(weather)

    def called() -> str:
        (call,) = chat.bind_tools([function], tool_choice="any").invoke(QUESTION).tool_calls
        return checked(call["name"], json.dumps(call["args"]))

    def answered() -> object:
        message = chat.bind_tools([function], tool_choice="weather").invoke(QUESTION)
        result = function.invoke(message.tool_calls[0])
        return chat.bind_tools([function]).invoke([("human", QUESTION), message, result]).content

    return {"langchain: bind_tools": called, "langchain: an answer after a tool's result": answered}


def of_litellm_tools(url: str, model: str) -> dict[str, Callable[[], object]]:
    import litellm

    asked: dict[str, Any] = {"api_base": url, "api_key": "none", "max_tokens": 100, "temperature": 0}

    def called() -> str:
        forced = {"tools": [WEATHER], "tool_choice": "required"}
        answer = litellm.completion(model=f"hosted_vllm/{model}", messages=MESSAGES, **asked, **forced)
        call = answer.choices[0].message.tool_calls[0]
        return checked(call.function.name, call.function.arguments)

    return {"litellm: a forced tool call": called}


def of_agents(url: str, model: str) -> dict[str, Callable[[], object]]:
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI
    from pydantic import BaseModel

    set_tracing_disabled(disabled=True)
    calls: list[str] = []

    class Report(BaseModel):
        city: City
        is_wet: bool

    def noted(city: City) -> str:
        """Return the weather of a city."""
        calls.append(city)
        return weather(city)

    tool = function_tool(noted, name_override="weather")

    def agent(**options: Any) -> Any:
        client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0)  # of one event loop
        return Agent(
            name="Assistant",
            instructions="Be brief.",
            model=OpenAIChatCompletionsModel(model=model, openai_client=client),
            **{"model_settings": ModelSettings(max_tokens=100, temperature=0)} | options,
        )

    def with_tool() -> Any:
        forced = ModelSettings(max_tokens=100, temperature=0, tool_choice="required")
        calls.clear()
        return agent(tools=[tool], model_settings=forced)

    def answered() -> str:
        told = asyncio.run(Runner.run(with_tool(), QUESTION)).final_output
        return f"{', '.join(checked('weather', json.dumps({'city': city})) for city in calls)}, then {told!r}"

    async def streamed() -> str:
        run = Runner.run_streamed(with_tool(), QUESTION)
        kinds = [event.type async for event in run.stream_events()]
        return f"{len(calls)} call, {kinds.count('raw_response_event') > 0}, {run.final_output!r}"

    def structured() -> object:
        return asyncio.run(Runner.run(agent(output_type=Report), QUESTION)).final_output

    def handed_over() -> object:
        forced = ModelSettings(max_tokens=100, temperature=0, tool_choice="required")
        poet = Agent(
            name="Poet",
            instructions="Write.",
            model=agent().model,
            model_settings=ModelSettings(max_tokens=24),
        )
        run = asyncio.run(Runner.run(agent(handoffs=[poet], model_settings=forced), QUESTION))
        return f"to {run.last_agent.name}"

    return {
        "agents: a tool and an answer": answered,
        "agents: the same, streamed": lambda: asyncio.run(streamed()),
        "agents: a typed answer": structured,
        "agents: a handoff": handed_over,
    }


def of_lightllm(url: str, _model: str) -> dict[str, Callable[[], object]]:
    import requests

    base, asked = url.removesuffix("/v1"), {"do_sample": False, "ignore_eos": True, "max_new_tokens": 12}
    body: Any = {"inputs": "What is AI?", "parameters": asked}

    def whole() -> object:
        return requests.post(f"{base}/generate", json=body, timeout=60).json()["generated_text"][0]

    def streamed() -> str:
        text = ""
        with requests.post(f"{base}/generate_stream", json=body, stream=True, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith(b"data:"):
                    text += json.loads(line[len(b"data:") :])["token"]["text"]
        if text != whole():
            raise ValueError(f"streamed {text!r}, but whole {whole()!r}")
        return text

    return {"lightllm: /generate": whole, "lightllm: /generate_stream": streamed}
