"""Answers of `/generate` and `/generate_stream`."""

from loong.server.reference.answer_schemas import Answer, FinishReason


class GeneratedToken(Answer):
    """One token of an answer."""

    id: int
    text: str
    logprob: float | None
    """Null unless `return_details` is true."""
    special: bool
    count_output_tokens: int
    """The number of tokens of the answer so far."""
    prompt_tokens: int


class Generated(Answer):
    """A whole answer. The fields of an answer are lists where there are several."""

    generated_text: list[str]
    count_output_tokens: int | list[int]
    finish_reason: FinishReason | list[FinishReason]
    prompt_tokens: int
    tokens: list[GeneratedToken] | list[list[GeneratedToken]] = []
    """If `return_details` is true."""


class GeneratedEvent(Answer):
    """One token of a stream."""

    token: GeneratedToken
    generated_text: None
    finished: bool
    """The last token's is true; no event follows it."""
    finish_reason: FinishReason | None
    details: None
