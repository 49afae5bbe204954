"""Bad words as sequences of tokens, as vLLM reads them."""

from collections.abc import Sequence

from loong.core.request import TokenId
from loong.server.api.errors import bad_request
from loong.server.openai.prompts import check_token_ids
from loong.server.text.tokenizer import Tokenizer

MAX_TOKENS = 4096  # of all words; workers get them with every batch


async def bad_word_ids(
    words: Sequence[str], tokenizer: Tokenizer, vocab_size: int
) -> tuple[tuple[TokenId, ...], ...]:
    """Return the tokens of each word at the beginning of a text, and after a blank.

    The latter count if there are as many, and if the first of them differs. Raises a 400 for words without
    tokens, of too many tokens, or with tokens that the model does not have.
    """
    bare = [word.lstrip() for word in words]
    found: list[tuple[TokenId, ...]] = []
    at_beginning = await tokenizer.encode_all(bare, add_special_tokens=False)
    after_blank = await tokenizer.encode_all([f" {word}" for word in bare], add_special_tokens=False)
    for index, (first, second) in enumerate(zip(at_beginning, after_blank, strict=True)):
        if not first:
            raise bad_request(f"bad_words[{index}] is {words[index]!r}, which has no token", "bad_words")
        found.append(tuple(first))
        if len(second) == len(first) and second[0] != first[0]:
            found.append(tuple(second))
    if (num_tokens := sum(map(len, found))) > MAX_TOKENS:
        message = f"bad_words have {num_tokens} tokens, but at most {MAX_TOKENS} are allowed"
        raise bad_request(message, "bad_words")
    check_token_ids("bad_words", [token_id for word in found for token_id in word], vocab_size)
    return tuple(dict.fromkeys(found))
