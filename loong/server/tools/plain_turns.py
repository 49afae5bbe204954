"""Tools for chat templates without tools: the system turn describes them in Hermes' format."""

import json
from collections.abc import Mapping, Sequence

from loong.server.text.turn_content import like, text_of

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


def with_offer(turns: Sequence[Turn], tools: Sequence[object]) -> Sequence[Turn]:
    """Return turns with the tools in the system turn, which comes first."""
    offer, first = _OFFER.format(tools="\n".join(map(_written, tools))), turns[0]
    if first["role"] in ("system", "developer"):
        text = "\n\n".join(filter(None, (text_of(first["content"]), offer)))
        return [{**first, "content": like(first["content"], text)}, *turns[1:]]
    return [{"role": "system", "content": offer}, *turns]


def plain_turns(turns: Sequence[Turn]) -> list[Turn]:
    """Return equal turns of system, user and assistant only.

    Calls become text of the assistant's turns. Results become turns of the user, and adjoining results are
    joined.
    """
    plain: list[Turn] = []
    are_results = False
    for turn in turns:
        if turn["role"] == "tool":
            text = _RESULT.format(content=text_of(turn["content"]))
            if are_results:
                text = f"{text_of(plain.pop()['content'])}\n{text}"
            plain.append({"role": "user", "content": like(turn["content"], text)})
        else:
            plain.append(_with_text_calls(turn))
        are_results = turn["role"] == "tool"
    return plain


def _with_text_calls(turn: Turn) -> Turn:
    calls = turn.get("tool_calls")
    if not isinstance(calls, list):
        return turn
    texts = [_CALL.format(call=_written(call["function"])) for call in calls]
    content = like(turn["content"], "\n".join(filter(None, [text_of(turn["content"]), *texts])))
    return {name: value for name, value in turn.items() if name != "tool_calls"} | {"content": content}


def _written(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
