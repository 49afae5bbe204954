"""Texts that chat templates write, in this process and without bounds."""

from collections.abc import Mapping, Sequence
from typing import Any

from loong.server.text.chat_template import ChatTemplate
from loong.server.text.template_process import Outcome, answer


def chat_text(
    template: ChatTemplate | None, messages: Sequence[Mapping[str, object]], **others: Any
) -> str:  # Any: the parameters of `request`
    """Return the text that a template writes for some messages. The test fails if it refuses them."""
    assert template is not None
    answered = answer(template.request(messages, **others))
    assert answered[0] == Outcome.TEXT, answered
    return answered[1:].decode()
