"""Answers of `/generate` and `/generate_stream`."""

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from loong.server.answers.base import Answer, FinishReason

CachedTokens = Annotated[int, Meta(description="Prompt tokens that were read from the prefix cache.")]


class GeneratedToken(Answer):
    """One token of an answer."""

    id: int
    text: str
    logprob: Annotated[float | None, Meta(description="Null unless `return_details` is true.")]
    special: bool
    count_output_tokens: Annotated[int, Meta(description="The number of tokens of the answer so far.")]
    prompt_tokens: int
    cached_tokens: CachedTokens


class Generated(Answer):
    """A whole answer. The fields of an answer are lists where there are several."""

    generated_text: list[str]
    count_output_tokens: int | list[int]
    finish_reason: FinishReason | list[FinishReason]
    prompt_tokens: int
    cached_tokens: CachedTokens
    tokens: Annotated[
        list[GeneratedToken | list[GeneratedToken]] | UnsetType,
        Meta(description="If `return_details` is true."),
    ] = UNSET


class GeneratedEvent(Answer, kw_only=True):
    """One token of a stream."""

    token: GeneratedToken
    generated_text: None = None
    finished: Annotated[bool, Meta(description="The last token's is true; no event follows it.")]
    finish_reason: FinishReason | None
    details: None = None
