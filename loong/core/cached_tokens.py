"""Tokens of a prompt that a request reads instead of computing them."""

from dataclasses import dataclass

from loong.core.request import RequestId


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """The number of tokens of its prompt that a request found computed when it began."""

    request_id: RequestId
    num_tokens: int
