"""Steps of `clients.py` with tools and agents: openai, LangChain's, LiteLLM's and OpenAI's Agents SDK."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

    def responded() -> object:
        answer = client.responses.create(model=model, input=QUESTION, max_output_tokens=24, temperature=0)
        return answer.output_text

    return {
        "openai: a response": responded,
        "openai: a forced tool call": called,
        "openai: a forced tool call, streamed": streamed,
        "openai: an answer after a tool's result": answered,
    }


def of_langchain_tools(url: str, model: str) -> dict[str, Callable[[], object]]:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model=model, base_url=url, api_key="none", max_retries=0, max_tokens=100, temperature=0)
    function = tool(weather)
    forced: dict[str, Any] = {"tool_choice": "any", "parallel_tool_calls": False}

    def called() -> str:
        (call,) = chat.bind_tools([function], **forced).invoke(QUESTION).tool_calls
        return checked(call["name"], json.dumps(call["args"]))

    def answered() -> object:
        message = chat.bind_tools([function], **forced).invoke(QUESTION)
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


@dataclass(frozen=True)
class AgentRuns:
    """Runs of an agent at one server, each with a client of its own."""

    url: str
    model: str
    api: str = "OpenAIChatCompletionsModel"
    is_streamed: bool = False

    async def run(self, tool_choice: str | None = None, others: Sequence[str] = (), **options: Any) -> Any:
        """Return what the Agents SDK gives for the question; `others` are agents to hand over to."""
        import agents
        from openai import AsyncOpenAI

        settings: dict[str, Any] = {"max_tokens": 200, "temperature": 0, "parallel_tool_calls": False}
        async with AsyncOpenAI(base_url=self.url, api_key="none", max_retries=0) as client:
            brief = agents.ModelSettings(max_tokens=60, temperature=0)
            chat = getattr(agents, self.api)(model=self.model, openai_client=client)
            options["handoffs"] = [agents.Agent(name, model=chat, model_settings=brief) for name in others]
            if tool_choice is None:
                del settings["parallel_tool_calls"]
            chosen = agents.ModelSettings(**settings, tool_choice=tool_choice)
            agent = agents.Agent("Assistant", model=chat, model_settings=chosen, **options)
            if not self.is_streamed:
                return await agents.Runner.run(agent, QUESTION)
            streamed = agents.Runner.run_streamed(agent, QUESTION)
            if not [event async for event in streamed.stream_events()]:
                raise ValueError("the stream has no events")
            return streamed


def of_agents(url: str, model: str) -> dict[str, Callable[[], object]]:
    from agents import function_tool, set_tracing_disabled
    from pydantic import BaseModel

    set_tracing_disabled(disabled=True)
    responses = "OpenAIResponsesModel"
    at_once = {"tool_use_behavior": "stop_on_first_tool"}  # the SDK refuses text that is cut off

    class Report(BaseModel):
        city: City
        is_wet: bool

    def with_tool(runs: AgentRuns, **options: Any) -> str:
        calls: list[str] = []

        def noted(city: City) -> str:
            """Return the weather of a city."""
            calls.append(city)
            return weather(city)

        tool = function_tool(noted, name_override="weather")
        output = asyncio.run(runs.run("required", tools=[tool], **options)).final_output
        (city,) = calls
        return f"{checked('weather', json.dumps({'city': city}))}, then {output!r}"

    def structured() -> object:
        return asyncio.run(AgentRuns(url, model).run(output_type=Report)).final_output

    def handed_over() -> str:
        return f"to {asyncio.run(AgentRuns(url, model).run('required', ['Poet'])).last_agent.name}"

    return {
        "agents: a tool and an answer": lambda: with_tool(AgentRuns(url, model)),
        "agents: the same, streamed": lambda: with_tool(AgentRuns(url, model, is_streamed=True)),
        "agents: a tool, through /v1/responses": lambda: with_tool(
            AgentRuns(url, model, responses), **at_once
        ),
        "agents: the same, streamed through it": lambda: with_tool(
            AgentRuns(url, model, responses, is_streamed=True), **at_once
        ),
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
