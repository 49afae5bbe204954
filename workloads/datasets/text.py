"""Lengths of texts in tokens, without a tokenizer."""

BYTES_PER_TOKEN = 4


def estimated_tokens(text: str) -> int:
    """Estimate the tokens of a text: one in four bytes of UTF-8, at least 1.

    OpenAI's rule of thumb is four characters of English a token. Chinese has three bytes a character and
    somewhat less than a token for each, so that bytes serve both.
    """
    return max(1, round(len(text.encode("utf-8", "surrogatepass")) / BYTES_PER_TOKEN))
