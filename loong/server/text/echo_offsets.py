"""Offsets of the tokens of an echoed prompt in its text."""

from collections.abc import Sequence
from itertools import accumulate

from loong.core.request import TokenId
from loong.server.text.detokenizer import IncrementalDetokenizer, TokenDecoder


def echo_offsets(decoder: TokenDecoder, token_ids: Sequence[TokenId], text: str) -> list[int]:
    """Return the offset of each token in the echoed `text`, in characters.

    Tokens that the tokenizer adds before a prompt given as text have no text in it, and begin at 0.
    """
    detokenizer = IncrementalDetokenizer(decoder, skip_special_tokens=False)
    ends = list(accumulate(len(detokenizer.add(token_id)) for token_id in token_ids))
    num_before = ends[-1] + len(detokenizer.finish()) - len(text)
    return [min(max(0, begin - num_before), len(text)) for begin in (0, *ends[:-1])]
