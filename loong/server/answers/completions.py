"""Answers of `/v1/completions`."""

from collections.abc import Sequence
from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from loong.server.answers.base import Answer, FinishReason, StopReason


class PromptTokensDetails(Answer):
    """Details of prompt tokens."""

    cached_tokens: Annotated[int, Meta(description="Prompt tokens that were read from the prefix cache.")]


class Usage(Answer):
    """Token counts, with each prompt counted once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(Answer):
    """Lists with an entry for each token. The first token of an echoed prompt has null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: Annotated[
        list[dict[str, float] | None], Meta(description="The likeliest tokens and the chosen one.")
    ]
    text_offset: Annotated[
        list[int], Meta(description="The offset of the token's text in the answer, in characters.")
    ]


class RankedLogprob(Answer):
    """The log probability of a token at a position of the prompt. The likeliest token has rank 1."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = Annotated[
    list[dict[str, RankedLogprob] | None] | UnsetType,
    Meta(description="By token id, the prompt's own token first; null for the first token."),
]


class CompletionChoice(Answer):
    """One choice of one prompt, or a piece of it in a stream."""

    index: Annotated[int, Meta(description="Counts the choices of the first prompt, then those of the next.")]
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: StopReason
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: Annotated[
        Sequence[int] | UnsetType, Meta(description="In a stream, with the first piece.")
    ] = UNSET
    prompt_logprobs: PromptLogprobs = UNSET


class Completion(Answer, tag_field="object", tag="text_completion"):
    """A completion, or a chunk of its stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
