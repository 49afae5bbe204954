"""Tools for chat templates without tools: the system turn describes them in Hermes' format."""

import json
from collections.abc import Mapping, Sequence

Turn = Mapping[str, object]  # as chat templates expect it

_OFFER = """\
You may call functions to answer. These are the functions, each as JSON:
<tools>
{tools}
</tools>
To call a function, write its name and its arguments as JSON between tags, each call between its own:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>
The results come between <tool_response> tags. Use them to answer in plain words."""
_CALL = "<tool_call>\n{call}\n</tool_call>"
_RESULT = "<tool_response>\n{content}\n</tool_response>"


def plain_turns(turns: Sequence[Turn], tools: Sequence[object] | None) -> list[Turn]:
    """Return equal turns of system, user and assistant only, with the tools in the system turn.

    Calls become text of the assistant's turns. Results become turns of the user, and adjoining results are
    joined.
    """
    plain: list[Turn] = []
    are_results = False
    for turn in turns:
        content = str(turn["content"])
        if turn["role"] == "tool":
            content = _RESULT.format(content=content)
            if are_results:
                content = f"{plain.pop()['content']}\n{content}"
            plain.append({"role": "user", "content": content})
        else:
            plain.append(_with_text_calls(turn))
        are_results = turn["role"] == "tool"
    return plain if tools is None else _with_offer(plain, tools)


def _with_text_calls(turn: Turn) -> Turn:
    calls = turn.get("tool_calls")
    if not isinstance(calls, list):
        return turn
    texts = [_CALL.format(call=_written(call["function"])) for call in calls]
    content = "\n".join(filter(None, [str(turn["content"]), *texts]))
    return {name: value for name, value in turn.items() if name != "tool_calls"} | {"content": content}


def _with_offer(turns: list[Turn], tools: Sequence[object]) -> list[Turn]:
    offer = _OFFER.format(tools="\n".join(map(_written, tools)))
    if turns and turns[0]["role"] in ("system", "developer"):
        first = {**turns[0], "content": "\n\n".join(filter(None, (str(turns[0]["content"]), offer)))}
        return [first, *turns[1:]]
    return [{"role": "system", "content": offer}, *turns]


def _written(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
