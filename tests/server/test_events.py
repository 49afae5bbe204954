"""Events of a stream."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loong.core.events import Logprobs
from loong.core.request import FinishReason, NewRequest, SamplingParams
from loong.server.api.sse import event_of
from loong.server.openai.answer import AnswerShape, ResponseContext
from loong.server.openai.chat import ChatShape
from loong.server.openai.choices import Choices
from loong.server.openai.completions import CompletionShape
from loong.server.openai.output import Delta
from loong.server.openai.schemas import StreamOptions
from loong.server.text.tokenizer import Tokenizer

DELTAS = st.builds(
    Delta,
    choice=st.integers(0, 3),
    index=st.integers(1, 9),
    text=st.text(),
    token_id=st.integers(0, 255),
    text_offset=st.integers(0, 9),
    logprobs=st.none() | st.just(Logprobs(-0.5, ((97, -0.5),))),
    finish_reason=st.none() | st.just(FinishReason.LENGTH),
    stop_reason=st.none(),
    prompt_logprobs=st.none(),
    parts=st.none(),  # chunks of these depend on what was sent before
)
CHOICES = (Choices(0, NewRequest("cmpl-1", (97,), SamplingParams())),) * 4
OPTIONS = st.builds(StreamOptions, include_usage=st.booleans(), continuous_usage_stats=st.booleans())


@pytest.mark.parametrize("shape_type", [CompletionShape, ChatShape])
@given(deltas=st.lists(DELTAS, min_size=1), options=OPTIONS, return_token_ids=st.booleans())
def test_events_are_the_json_of_their_chunks_however_they_are_made(
    tokenizer: Tokenizer,
    shape_type: type[AnswerShape],
    deltas: list[Delta],
    options: StreamOptions,
    return_token_ids: bool,
) -> None:
    shape = shape_type(
        ResponseContext("cmpl-1", 'a "model"', 5, CHOICES, 3, return_token_ids, options), tokenizer
    )
    for number, delta in enumerate(deltas):
        assert shape.events(delta, number) == b"".join(map(event_of, shape.chunks(delta, number)))
